"""Saves views of gathered weights for the backward pass without the weights (ZeRO's stage 3).

A linear layer saves a transposed view of its weight. Such a view would keep every layer's gathered
weights in memory from the forward to the backward pass, which gathers them again. So only the
view's place in its weight is saved, and the view is made from the weight that the backward pass
gathers.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from learner.backends import activation_offload


@dataclass(frozen=True)
class SavedView:
    """A view of a weight; ``offset`` from the weight's start, in elements."""

    weight: Any
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def view(self) -> Tensor:
        """Return the view; a weight that is not gathered is gathered by all ranks."""
        is_missing = self.weight.ds_status.name == "NOT_AVAILABLE"
        if is_missing:
            self.weight.all_gather()
        data: Tensor = self.weight.data
        view = data.as_strided(self.size, self.stride, data.storage_offset() + self.offset)
        if is_missing:
            # The view keeps the gathered memory alive; the weight itself need not.
            self.weight.partition()
        return view


def save_views_as_places(offloaded: bool) -> AbstractContextManager[Any]:
    """Around a forward pass, save views of gathered weights as places.

    Args:
        offloaded: whether activations go to host memory, see
            ``learner.backends.activation_offload``.
    """

    def pack(tensor: Tensor) -> Any:
        if (place := _find_place(tensor)) is not None:
            return place
        if offloaded:
            return activation_offload.pack_tensor(tensor)
        return tensor

    def unpack(packed: Any) -> Tensor:
        if isinstance(packed, SavedView):
            return packed.view()
        return activation_offload.unpack_tensor(packed)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def _find_place(tensor: Tensor) -> SavedView | None:
    weight = tensor._base
    if (
        not isinstance(weight, nn.Parameter)
        or not hasattr(weight, "ds_id")
        or weight.dtype != tensor.dtype
    ):
        return None
    if weight.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr():
        # A view of an earlier gathering: the weight has other memory by now.
        return None
    offset = int(tensor.storage_offset()) - int(weight.storage_offset())
    return SavedView(weight, tensor.size(), tensor.stride(), offset)
