"""Slices of the training state that a rank holds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Slice:
    """Neighbouring elements of one tensor of the training state, or a block of a matrix.

    Args:
        name: of the tensor in a model that is not divided.
        shape: of the whole tensor.
        start: of the first of these elements in the flattened whole.
        tensor: the elements, of any shape; live, so loading writes into it.
        shared: whether every rank holds the same elements.
        among: if only some ranks hold the same elements, this rank's place among them, and their
            number.
        block: whether ``tensor`` has some columns of a matrix, for some or all of its rows.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    tensor: Tensor
    shared: bool = False
    among: tuple[int, int] = (0, 1)
    block: bool = False

    @classmethod
    def whole(cls, name: str, tensor: Tensor, *, shared: bool = True) -> Slice:
        """Return a slice of all elements."""
        return cls(name, tuple(tensor.shape), 0, tensor, shared)

    def below(self, prefix: str) -> Slice:
        """Return the same slice with a longer name."""
        return replace(self, name=prefix + self.name)

    def span(self, rank: int, size: int) -> tuple[int, int]:
        """Return the range of ``own`` in this slice: elements, or rows of a block."""
        place, count = (rank, size) if self.shared else self.among
        length = len(self.tensor) if self.block else self.tensor.numel()
        return length * place // count, length * (place + 1) // count

    def own(self, rank: int, size: int) -> Slice:
        """Return what a rank of ``size`` answers for: its equal share of what several hold."""
        first, last = self.span(rank, size)
        elements = self.tensor.detach()
        if self.block:
            start = self.start + first * self.shape[1]
        else:
            elements = elements.reshape(-1)
            start = self.start + first
        return Slice(self.name, self.shape, start, elements[first:last], block=self.block)

    def host_copy(self, rank: int, size: int) -> Slice:
        """Return a copy in host memory of what a rank writes."""
        own = self.own(rank, size)
        return replace(
            own, tensor=own.tensor.to("cpu", copy=True, memory_format=torch.contiguous_format)
        )


@torch.no_grad()
def copy_slices(slices: Iterable[Slice], rank: int, size: int) -> list[Slice]:
    """Return host copies of what a rank of ``size`` writes; training does not change them."""
    copies = (piece.host_copy(rank, size) for piece in slices)
    return [copy for copy in copies if copy.tensor.numel()]
