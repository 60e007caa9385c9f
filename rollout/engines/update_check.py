"""Checks whether a weight update fits the tensors that an engine holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from broker.errors import OfferRefused

if TYPE_CHECKING:
    import torch


def check_fit(current: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> None:
    """Check that an update has exactly the tensors that the engine holds.

    Raises:
        OfferRefused: if a name is missing or unknown, or a shape differs; names the first one.
    """
    from broker.weights.memory.on_demand import OnDemand  # imports torch

    if isinstance(tensors, OnDemand):
        tensors = tensors.base  # reading shapes must not compute tensors
    if missing := sorted(current.keys() - tensors.keys()):
        raise OfferRefused(
            f"the update lacks {len(missing)} of {len(current)} tensors, the first is {missing[0]}"
        )
    if unknown := sorted(tensors.keys() - current.keys()):
        raise OfferRefused(
            f"the update has {len(unknown)} unknown tensors, the first is {unknown[0]}"
        )
    for name, tensor in current.items():
        if tensor.shape != tensors[name].shape:
            shape = tuple(tensors[name].shape)
            expected = tuple(tensor.shape)
            raise OfferRefused(f"{name} has shape {shape}, the model expects {expected}")


def materialized(tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """Return an update with all tensors computed: adapters merged, FP8 dequantized."""
    from broker.weights.memory.on_demand import OnDemand

    return tensors.made() if isinstance(tensors, OnDemand) else tensors
