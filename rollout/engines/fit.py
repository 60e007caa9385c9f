"""Whether an update of the weights fits what an engine holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from broker.errors import TransferFailed

if TYPE_CHECKING:
    import torch


def check_fit(held: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> None:
    """An update brings exactly the tensors that are held.

    Raises:
        TransferFailed: a name is missing or unknown, or a shape differs; the first one is named.
    """
    from broker.weights.memory.on_demand import OnDemand  # imports torch

    if isinstance(tensors, OnDemand):
        tensors = tensors.base  # nothing is computed for a look at shapes
    if missing := sorted(held.keys() - tensors.keys()):
        raise TransferFailed(f"the update lacks {len(missing)} of {len(held)} tensors, the first is {missing[0]}")
    if unknown := sorted(tensors.keys() - held.keys()):
        raise TransferFailed(f"the update brings {len(unknown)} unknown tensors, the first is {unknown[0]}")
    for name, tensor in held.items():
        if tensor.shape != tensors[name].shape:
            raise TransferFailed(f"{name} has shape {tuple(tensors[name].shape)}, the model wants {tuple(tensor.shape)}")


def made(tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """An update whose tensors are there: an adapter's are merged now, what travelled as FP8 is made whole, all others were."""
    from broker.weights.memory.on_demand import OnDemand

    return tensors.made() if isinstance(tensors, OnDemand) else tensors
