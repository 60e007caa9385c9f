"""Finds the first tensor of a model that holds NaN or infinity, in one pass over the memory and one
synchronization.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


@torch.no_grad()
def first_non_finite(tensors: Mapping[str, Tensor]) -> str:
    """Return the first tensor with a value that is not finite, how many it has, and where; empty if
    there is none.

    Args:
        tensors: by name, on any devices. Of distributed ones only this process's part is read.
    """
    extremes: dict[torch.device, list[tuple[str, Tensor]]] = {}
    for name, tensor in tensors.items():
        local = _local(tensor)
        if (
            local.is_floating_point()
            and local.numel()
            and not local.is_meta
            and local.element_size() > 1
        ):
            extremes.setdefault(local.device, []).append(
                (name, torch.stack(torch.aminmax(local)).double())
            )
    broken: set[str] = set()
    for pairs in extremes.values():
        is_finite = torch.stack([extreme for _, extreme in pairs]).isfinite().all(1).tolist()
        broken |= {name for (name, _), finite in zip(pairs, is_finite, strict=True) if not finite}
    return next((_described(name, _local(tensors[name])) for name in tensors if name in broken), "")


def _local(tensor: Tensor) -> Tensor:
    """Return this process's part of a tensor."""
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part.detach()


def _described(name: str, tensor: Tensor) -> str:
    broken = (~tensor.isfinite()).nonzero()
    first = broken[0].tolist()
    value = float(tensor[tuple(first)])
    return f"{name} holds {value} at {first} ({len(broken)} of its {tensor.numel()} values are not finite)"
