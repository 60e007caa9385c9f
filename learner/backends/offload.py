"""Lists what a rank keeps on its device between two steps, to be moved away while another process uses it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from learner.backends.optimizer import MasterOptimizer


def held_tensors(
    modules: Sequence[nn.Module], optimizers: Sequence[MasterOptimizer], device: torch.device
) -> Iterator[Tensor]:
    """Yield the tensors on the device: weights, buffers, gradients, masters and moments; some share memory."""
    for module in modules:
        for tensor in (*module.parameters(), *module.buffers()):
            yield from (
                local(one) for one in (tensor, tensor.grad) if one is not None and one.device.type == device.type
            )
    for optimizer in optimizers:
        yield from (tensor for tensor in optimizer.held() if tensor.device.type == device.type)


def local(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this process holds."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor
