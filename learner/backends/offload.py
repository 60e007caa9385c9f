"""What the backward pass needs waits for it in host memory."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import torch
from torch import Tensor, nn

_SMALLEST_BYTES: Final = 1 << 16  # below this a copy costs more than the room is worth


def activations_in_host_memory(wanted: bool) -> AbstractContextManager[Any]:
    """Around a forward pass: activations go to pinned host memory, and come back when the backward pass asks for them.

    Weights stay where they are. Copies wait for nothing but the stream that they are made on, so they take their time from the
    passes; on a CPU nothing is copied.
    """
    return torch.autograd.graph.saved_tensors_hooks(pack, unpack) if wanted else nullcontext()


def pack(tensor: Tensor) -> Tensor | tuple[torch.device, Tensor]:
    """What is kept of a tensor until the backward pass."""
    if not _leaves(tensor):
        return tensor
    held = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
    held.copy_(tensor, non_blocking=True)
    return tensor.device, held


def unpack(packed: Tensor | tuple[torch.device, Tensor]) -> Tensor:
    """The tensor again, where it was."""
    if isinstance(packed, Tensor):
        return packed
    device, held = packed
    return held.to(device, non_blocking=True)


def _leaves(tensor: Tensor) -> bool:
    is_weight = isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)  # linear layers keep a transposed view
    return tensor.is_cuda and tensor.nbytes >= _SMALLEST_BYTES and not is_weight
