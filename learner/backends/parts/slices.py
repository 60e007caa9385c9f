"""Slices of the training state that a rank holds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Slice:
    """Neighbouring elements of one tensor of the training state.

    Args:
        name: of the tensor in a model that is not divided.
        shape: of the whole tensor.
        start: of these elements in the flattened whole.
        tensor: the elements, of any shape; live, so loading writes into it.
        shared: whether every rank holds the same elements.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    tensor: Tensor
    shared: bool = False

    @classmethod
    def whole(cls, name: str, tensor: Tensor, *, shared: bool = True) -> Slice:
        """Return a slice of all elements."""
        return cls(name, tuple(tensor.shape), 0, tensor, shared)

    def below(self, prefix: str) -> Slice:
        """Return the same slice with a longer name."""
        return replace(self, name=prefix + self.name)

    def staged(self, rank: int, size: int) -> Slice:
        """Return a copy, (n,), in host memory of what a rank writes: of what all hold, an equal range."""
        count = self.tensor.numel()
        first, last = (count * place // size for place in (rank, rank + 1)) if self.shared else (0, count)
        own = self.tensor.detach().reshape(-1)[first:last]
        return Slice(self.name, self.shape, self.start + first, own.to("cpu", copy=True))


@torch.no_grad()
def stage(slices: Iterable[Slice], rank: int, size: int) -> list[Slice]:
    """Return host copies of what a rank of ``size`` writes; training does not change them."""
    return [copied for one in slices if (copied := one.staged(rank, size)).tensor.numel()]
