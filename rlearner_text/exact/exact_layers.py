"""Makes the layers of a transformers model exact: see ``tiled_rows`` for what that means.

Normalisations are left as they are: each sums over one row, in the same order for any number of
rows. Attention is the caller's, who has the cache: ``rlearner_text.exact.blockwise_attention``.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from broker.errors import ConfigError
from rlearner_text.exact.tiled_rows import apply_elementwise, apply_linear

# Modules with a class of these are elementwise.
_ACTIVATIONS: Final = ("torch.nn.modules.activation", "transformers.activations")
# Positions whose rotations are computed by one call, the same in every process.
_POSITIONS: Final = 64
# At least this many positions, for trials of sequences longer than the run's.
_FEWEST: Final = 1024
# Bytes to which kernels like their matrices aligned; others may be summed in another order.
_ALIGNMENT: Final = 64


def exact_problem(model: nn.Module) -> str:
    """Return why a model's layers cannot be made exact; empty if they can.

    Stacked experts and convolutions multiply matrices outside linear layers.
    """
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            continue
        if any(parameter.ndim > 1 for parameter in module.parameters(recurse=False)):
            return f"{type(module).__name__} multiplies matrices outside linear layers"
    return ""


def refuse_exact(model: nn.Module, problem: str) -> ConfigError:
    """Return the error about a model that cannot be exact."""
    return ConfigError("rollout.exact", True, f"false with {type(model).__name__}: {problem}")


def make_exact(model: nn.Module, max_context: int) -> None:
    """Let a model compute each token's states by the same operations in any batch.

    Args:
        model: on its device, in evaluation mode; ``exact_problem`` found nothing.
        max_context: tokens of the longest sequence.
    """
    for parameter in model.parameters():
        if parameter.device.type == "cpu" and parameter.data_ptr() % _ALIGNMENT:
            parameter.data = parameter.data.clone()
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.forward = partial(apply_linear, module)  # type: ignore[method-assign]
        elif type(module).__module__ in _ACTIVATIONS:
            module.forward = partial(apply_elementwise, module.forward)
        elif type(module).__name__.endswith("RotaryEmbedding"):
            module.forward = RotaryTable(module, max_context)


class RotaryTable:
    """The rotations of a rotary embedding, computed once for all positions.

    Cosines of a batch depend on how its numbers fall into vector registers.

    Args:
        module: the rotary embedding; its frequencies do not depend on the batch
            (``rlearner_text.rope``).
    """

    def __init__(self, module: nn.Module, max_context: int) -> None:
        self._compute = module.forward
        self._size = max(max_context, _FEWEST)
        self._tables: dict[tuple[Any, ...], tuple[Tensor, ...]] = {}

    @torch.no_grad()
    def __call__(self, states: Tensor, position_ids: Tensor, *kind: Any) -> tuple[Tensor, ...]:
        """Return cosine and sine, (rows, tokens, width), as the embedding does.

        Args:
            kind: of the layer, where layers differ.
        """
        key = (states.dtype, states.device, *kind)
        if key not in self._tables:
            self._tables[key] = self._make(states, kind)
        return tuple(table[position_ids] for table in self._tables[key])

    def _make(self, states: Tensor, kind: tuple[Any, ...]) -> tuple[Tensor, ...]:
        blocks = []
        for start in range(0, self._size, _POSITIONS):
            positions = torch.arange(start, start + _POSITIONS, device=states.device)
            blocks.append(self._compute(states, positions[None], *kind))
        return tuple(torch.cat([part[0] for part in parts]) for parts in zip(*blocks, strict=True))
