"""Takes the masks that transformers makes for a model's layers as rules, which apply to slots of
any length.

transformers builds a mask from a function of two positions: causal, a window, a chunk, or a
combination. That function is the only place where every architecture says what its layers see. It
is kept, in an empty tensor that passes through the model to the attention function, and evaluated
there for the positions of each sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from broker.errors import UserError


@dataclass(frozen=True, eq=False)
class MaskRule:
    """What a token of one kind of layer sees.

    Attributes:
        function: of transformers: batch, head, query and key positions to whether the query sees
            the key.
        reach: the length up to which a token sees all earlier ones; None: unknown.
    """

    function: Callable[[int, int, Tensor, Tensor], Tensor]
    reach: int | None

    def visible(self, query: Tensor, keys: Tensor) -> Tensor:
        """Return whether tokens at these positions see those at ``keys``, in their joint shape."""
        return self.function(0, 0, query, keys).expand((query + keys).shape)


def make_rule(
    *,
    mask_function: Callable[..., Any],
    local_size: int | None = None,
    device: Any = "cpu",
    **_: Any,
) -> Tensor | None:
    """Return a layer's rule instead of its mask; transformers calls this as its mask function.

    Returns:
        An empty tensor that ``mask_rule`` reads; None for plain causal attention.
    """
    from transformers.masking_utils import causal_mask_function

    if mask_function is causal_mask_function:
        return None
    carrier = torch.empty((1, 1, 0, 0), device=device)
    carrier.slot_rule = MaskRule(mask_function, local_size)  # type: ignore[attr-defined]
    return carrier


def mask_rule(attention_mask: Tensor | None, layer: str) -> MaskRule | None:
    """Return the rule of the mask that a layer was given; None for plain causal attention.

    Raises:
        UserError: if the mask does not come from ``make_rule``.
    """
    if attention_mask is None:
        return None
    rule = getattr(attention_mask, "slot_rule", None)
    if rule is None:
        raise UserError(f"{layer} makes an attention mask of its own")
    return cast(MaskRule, rule)
