"""What autograd keeps of a pass through a model whose weights are gathered for each layer and dropped again (ZeRO's stage 3).

A linear layer keeps a transposed view of its weight for the backward pass. Such a view is a name for gathered memory: it would hold
every layer's whole weights from the forward pass to the backward pass, which gathers them a second time for nothing. So what is kept is
where the view lies in its weight, and it is made again from the weight as gathered for the backward pass.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from learner.backends import offload


@dataclass(frozen=True)
class Place:
    """A view of a weight; in elements, ``offset`` from where the weight begins."""

    weight: Any
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def view(self) -> Tensor:
        """Of the weight as it is gathered now; by all ranks at once where it is not, as one that no layer of its own reads."""
        missing = self.weight.ds_status.name == "NOT_AVAILABLE"
        if missing:
            self.weight.all_gather()
        data: Tensor = self.weight.data
        found = data.as_strided(self.size, self.stride, data.storage_offset() + self.offset)
        if missing:
            self.weight.partition()  # the view holds what it needs
        return found


def places_for_weights(offloaded: bool) -> AbstractContextManager[Any]:
    """Around a forward pass: views of gathered weights are kept as places.

    Args:
        offloaded: activations go to host memory, see ``learner.backends.offload``.
    """

    def pack(tensor: Tensor) -> Any:
        place = _place(tensor)
        if place is not None:
            return place
        return offload.pack(tensor) if offloaded else tensor

    def unpack(packed: Any) -> Tensor:
        return packed.view() if isinstance(packed, Place) else offload.unpack(packed)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def _place(tensor: Tensor) -> Place | None:
    weight = tensor._base
    if not isinstance(weight, nn.Parameter) or not hasattr(weight, "ds_id") or weight.dtype != tensor.dtype:
        return None
    if weight.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr():
        return None  # of what was gathered another time
    return Place(weight, tensor.size(), tensor.stride(), int(tensor.storage_offset()) - int(weight.storage_offset()))
