"""Where micro-batches begin and end. Pure: decided by the order of the log and the samples' lengths, never by arrival time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

import numpy as np


class Sized(Protocol):
    """Anything that a forward pass reads ``num_inputs`` tokens of."""

    @property
    def num_inputs(self) -> int: ...


S = TypeVar("S", bound=Sized)


class Cutter(Generic[S]):
    """Takes samples one at a time in log order and gives back a micro-batch as soon as it is full.

    A micro-batch costs its rows times its longest row, in tokens, as rows are padded to the longest; packed, it costs its tokens.
    A sample that alone exceeds the budget gets a micro-batch of its own; one without trained tokens is left out, as nothing depends on it.

    Args:
        budget: tokens of a micro-batch, padding included.
        packed: rows are packed, so there is none.
    """

    def __init__(self, budget: int, *, packed: bool = False) -> None:
        if budget < 1:
            raise ValueError(f"budget is {budget}, must be at least 1")
        self.budget, self._packed = budget, packed
        self._held: list[S] = []
        self._longest = self._tokens = 0

    def add(self, sample: S) -> list[S] | None:
        """The micro-batch before this sample, if the sample no longer fits in it."""
        if sample.num_inputs == 0:
            return None
        full = self.flush() if self._held and self._cost(sample.num_inputs) > self.budget else None
        self._held.append(sample)
        self._longest = max(self._longest, sample.num_inputs)
        self._tokens += sample.num_inputs
        return full

    def flush(self) -> list[S] | None:
        """What is left, at the end of a step; None if nothing is."""
        held, self._held, self._longest, self._tokens = self._held, [], 0, 0
        return held or None

    def _cost(self, following: int) -> int:
        """Of what is held and one more sample."""
        if self._packed:
            return self._tokens + following
        return max(self._longest, following) * (len(self._held) + 1)


def cut(samples: Sequence[S], budget: int, *, packed: bool = False) -> list[list[S]]:
    """All micro-batches of a sequence of samples at once."""
    cutter = Cutter[S](budget, packed=packed)
    batches = [batch for sample in samples if (batch := cutter.add(sample))]
    return batches + ([rest] if (rest := cutter.flush()) else [])


def minibatches(samples: Sequence[S], count: int, seed: Sequence[int]) -> list[list[S]]:
    """One pass over a step's samples in ``count`` parts of like size, fewer where there are fewer samples, but at least one.

    Args:
        seed: of the order; one part keeps that of the samples.
    """
    if count == 1 or len(samples) < 2:
        return [list(samples)]
    order = np.random.default_rng(list(seed)).permutation(len(samples))
    return [[samples[i] for i in part] for part in np.array_split(order, min(count, len(samples)))]


def by_length(samples: Sequence[S], budget: int, *, packed: bool = False) -> list[list[S]]:
    """A micro-batch in slices of like lengths, each within ``budget`` tokens: less padding, and activations that fit a cache.

    The gradient is a sum over rows, so slicing does not change what is trained.
    """
    return cut(sorted(samples, key=lambda sample: sample.num_inputs), budget, packed=packed)
