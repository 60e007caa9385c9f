"""Lists what a rank keeps on its device between two steps, to be moved away for a while."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from learner.backends.optimizer import MasterOptimizer


def device_tensors(
    modules: Sequence[nn.Module], optimizers: Sequence[MasterOptimizer], device: torch.device
) -> Iterator[Tensor]:
    """Yield all tensors on the device, some of which share memory.

    Raises:
        RuntimeError: if FSDP's memory would have to be replaced, which its own tensors share, too.
    """
    for tensor in _all_tensors(modules, optimizers):
        if tensor is None or tensor.device.type != device.type:
            continue
        if not isinstance(tensor, DTensor):
            yield tensor
        elif (own := tensor._local_tensor).untyped_storage().resizable():
            yield own
        else:
            raise RuntimeError(
                "the memory of a divided tensor is not torch's own and cannot be emptied in place"
            )


def _all_tensors(
    modules: Sequence[nn.Module], optimizers: Sequence[MasterOptimizer]
) -> Iterator[Tensor | None]:
    for module in modules:
        for parameter in module.parameters():
            yield from (parameter, parameter.grad)
        yield from module.buffers()
    for optimizer in optimizers:
        yield from optimizer.resident_tensors()
