"""Recurrent and convolutional layers of packed rows: each sequence has a state of its own.

Layers of linear attention, state spaces and short convolutions carry a state along a row. In a
packed row they take its sequences as the rows of a batch, like attention. The way of transformers
(``cu_seq_lens_q``, ``seq_idx``) works only with kernels for few GPUs, and with no prefix that
sequences share.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from learner.backends.models.attention import InexactAttentionError
from learner.backends.models.packed_rows import PackedRow


class PackedMixer:
    """The forward pass of a layer that mixes tokens, by sequence.

    Attributes:
        packing: of the row that is computed, None for a padded batch; set before each block, also
            when its activations are computed again, so it belongs to the block's arguments and not
            to the model's pass.
    """

    def __init__(self, module: nn.Module) -> None:
        self.packing: PackedRow | None = None
        self._module = module
        self._forward = module.forward
        module.forward = self.run

    def remove(self) -> None:
        """Give the layer its own forward pass back."""
        self._module.forward = self._forward

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def run(self, *arguments: Any, **keywords: Any) -> Any:
        """Compute (rows, tokens, width), or each sequence of the packed row."""
        keywords.pop("packing", None)
        if self.packing is None:
            return self._forward(*arguments, **keywords)
        states, *extras = arguments or (keywords.pop("hidden_states"),)
        rows = [part[:, 0] for part in self.packing.rows(states[:, None])]
        results = [self._forward(part, *extras, **keywords) for part in rows]
        if not all(isinstance(result, Tensor) for result in results):
            raise InexactAttentionError(
                f"{type(self._module).__name__} returns more than its states"
            )
        return self.packing.flat([result[:, None] for result in results]).transpose(0, 1)


def separate_sequences(trunk: nn.Module) -> Callable[[], None]:
    """Let the mixing layers of a model's blocks take packed rows; return what undoes it."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    undo = ExitStack()
    for block in trunk.modules():
        if isinstance(block, GradientCheckpointingLayer):
            mixers = [PackedMixer(module) for module in block.modules() if _is_mixer(module)]
            if mixers:
                hook = block.register_forward_pre_hook(
                    partial(_set_packing, mixers), with_kwargs=True
                )
                for remove in (hook.remove, *(mixer.remove for mixer in mixers)):
                    undo.callback(remove)
    return undo.close


def _is_mixer(module: nn.Module) -> bool:
    """Return whether a layer carries a state along the tokens."""
    # All such layers of transformers begin with a short convolution over the tokens.
    return "forward" not in vars(module) and any(
        isinstance(child, nn.Conv1d) for child in module.children()
    )


def _set_packing(
    mixers: list[PackedMixer], _: nn.Module, __: tuple[Any, ...], keywords: dict[str, Any]
) -> None:
    for mixer in mixers:
        mixer.packing = keywords.get("packing")
