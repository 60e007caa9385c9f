"""Keeps activations in host memory until the backward pass."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import torch
from torch import Tensor, nn

# Starting a copy of a smaller tensor costs more than its memory is worth.
_SMALLEST_BYTES: Final = 1 << 16


def activations_in_host_memory(enabled: bool) -> AbstractContextManager[Any]:
    """Around a forward pass, keep activations in pinned host memory until the backward pass.

    Weights stay in place. Copies run on the stream of the pass and so lengthen it; on a CPU nothing
    is copied.
    """
    return (
        torch.autograd.graph.saved_tensors_hooks(pack_tensor, unpack_tensor)
        if enabled
        else nullcontext()
    )


def pack_tensor(tensor: Tensor) -> Tensor | tuple[torch.device, Tensor]:
    """Return what autograd saves of a tensor."""
    if not _is_offloaded(tensor):
        return tensor
    host_copy = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
    host_copy.copy_(tensor, non_blocking=True)
    return tensor.device, host_copy


def unpack_tensor(packed: Tensor | tuple[torch.device, Tensor]) -> Tensor:
    """Return the tensor on its device."""
    if isinstance(packed, Tensor):
        return packed
    device, host_copy = packed
    return host_copy.to(device, non_blocking=True)


def _is_offloaded(tensor: Tensor) -> bool:
    # Weights stay on the device anyway; a linear layer saves a transposed view of its own.
    is_weight = isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)
    return tensor.is_cuda and tensor.nbytes >= _SMALLEST_BYTES and not is_weight
