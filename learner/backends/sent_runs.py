"""Elements of the weights that this rank sends, read only when they are copied."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from broker.weights.stripes.layout import ElementRun
from learner.backends.parts.names import MODEL
from learner.backends.parts.slices import Slice


@dataclass(frozen=True)
class SentRun:
    """Elements that this rank sends.

    Args:
        read: returns them as they are now, flat; may be collective, even for ranks that have none
            of the tensor.
    """

    run: ElementRun
    read: Callable[[], Tensor]

    @classmethod
    def of(cls, piece: Slice, rank: int, size: int) -> SentRun:
        """Return what a rank of ``size`` sends of a slice that is a range.

        Of what several ranks hold, each sends an equal range.
        """
        first, last = piece.span(rank, size)
        run = ElementRun(piece.name.removeprefix(MODEL), piece.start + first, last - first)
        return cls(run, partial(_flat_elements, piece, rank, size))


class RunsInOrder(Mapping[str, Tensor]):
    """Runs by their keys, each read once and in the order of the keys.

    The order is the same on all ranks, since reading a run may be collective.
    """

    def __init__(self, runs: Iterable[SentRun]) -> None:
        ordered = sorted(runs, key=lambda sent_run: sent_run.run.key)
        self._keys = {sent_run.run.key: sent_run for sent_run in ordered}
        self._waiting = iter(self._keys.items())

    def __getitem__(self, key: str) -> Tensor:
        for next_key, sent_run in self._waiting:
            elements = sent_run.read()
            if next_key == key:
                return elements
        raise KeyError(key)

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    def finish(self) -> None:
        """Take part in reading what remains, of which this rank sends nothing."""
        for _, sent_run in self._waiting:
            sent_run.read()


@torch.no_grad()
def _flat_elements(piece: Slice, rank: int, size: int) -> Tensor:
    return piece.own(rank, size).tensor
