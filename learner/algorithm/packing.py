"""Cuts samples into micro-batches, by log order and length, never by arrival time. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


class SizedSample(Protocol):
    """Object of which a forward pass reads ``num_inputs`` tokens."""

    @property
    def num_inputs(self) -> int: ...


class TokenSample(SizedSample, Protocol):
    """Object whose tokens can be compared."""

    @property
    def token_ids(self) -> Array: ...


S = TypeVar("S", bound=SizedSample)
T = TypeVar("T", bound=TokenSample)


class MicroBatchCutter(Generic[S]):
    """Cutter of samples, added in log order, into full micro-batches.

    A micro-batch costs its rows times its longest row, in tokens, as rows are padded to the
    longest; packed, it costs its tokens. A sample above the budget gets its own micro-batch; one
    without trained tokens is left out.

    Args:
        budget: tokens of a micro-batch, padding included.
        packed: whether rows are packed, without padding.
    """

    def __init__(self, budget: int, *, packed: bool = False) -> None:
        if budget < 1:
            raise ValueError(f"budget is {budget}, must be at least 1")
        self.budget = budget
        self._packed = packed
        self._samples: list[S] = []
        self._longest = 0
        self._tokens = 0

    def add(self, sample: S) -> list[S] | None:
        """Add a sample; return the micro-batch before it, if the sample no longer fits in it."""
        if sample.num_inputs == 0:
            return None
        full = None
        if self._samples and self._cost(sample.num_inputs) > self.budget:
            full = self.flush()
        self._samples.append(sample)
        self._longest = max(self._longest, sample.num_inputs)
        self._tokens += sample.num_inputs
        return full

    def flush(self) -> list[S] | None:
        """Return the last micro-batch of a step, None if it is empty."""
        samples = self._samples
        self._samples = []
        self._longest = 0
        self._tokens = 0
        return samples or None

    def _cost(self, num_inputs: int) -> int:
        if self._packed:
            return self._tokens + num_inputs
        return max(self._longest, num_inputs) * (len(self._samples) + 1)


def cut_micro_batches(samples: Sequence[S], budget: int, *, packed: bool = False) -> list[list[S]]:
    """Return all micro-batches of a sequence of samples."""
    cutter = MicroBatchCutter[S](budget, packed=packed)
    batches = [batch for sample in samples if (batch := cutter.add(sample))]
    if last_batch := cutter.flush():
        batches.append(last_batch)
    return batches


def split_minibatches(samples: Sequence[S], count: int, seed: Sequence[int]) -> list[list[S]]:
    """Return a step's samples in ``count`` shuffled parts of similar size, or in as many as it can.

    Args:
        seed: of the order; a single part is not shuffled.
    """
    if count == 1 or len(samples) < 2:
        return [list(samples)]
    order = np.random.default_rng(list(seed)).permutation(len(samples))
    return [[samples[i] for i in part] for part in np.array_split(order, min(count, len(samples)))]


def by_length(samples: Sequence[S], budget: int) -> list[list[S]]:
    """Cut a micro-batch into slices of similar lengths within ``budget`` tokens.

    They need less padding and cache. The gradient, a sum over rows, does not change.
    """
    return cut_micro_batches(sorted(samples, key=lambda sample: sample.num_inputs), budget)


def num_distinct_tokens(samples: Sequence[T]) -> int:
    """Return the tokens of a packed row of these samples."""
    shared = sum(
        num
        for _, num in prefix_order([sample.token_ids[: sample.num_inputs] for sample in samples])
    )
    return sum(sample.num_inputs for sample in samples) - shared


def by_prefix(samples: Sequence[T], budget: int) -> list[list[T]]:
    """Cut a micro-batch into slices whose packed rows have at most ``budget`` tokens.

    Samples that begin with the same tokens, as those of a group do, come into the same slice, whose
    row has these tokens once.
    """
    slices: list[list[T]] = []
    size = 0
    for index, shared in prefix_order(
        [sample.token_ids[: sample.num_inputs] for sample in samples]
    ):
        sample = samples[index]
        if not slices or size + sample.num_inputs - shared > budget:
            slices.append([])
            size = 0
            shared = 0
        slices[-1].append(sample)
        size += sample.num_inputs - shared
    return slices


def prefix_order(sequences: Sequence[Array]) -> list[tuple[int, int]]:
    """Order sequences of token ids so that each shares the longest prefix with its predecessor.

    Returns:
        The number of each sequence, and of the tokens that it shares.
    """
    order = sorted(
        range(len(sequences)), key=lambda index: sequences[index].astype(">u4").tobytes()
    )
    previous = np.empty(0, np.int64)
    order_and_prefixes: list[tuple[int, int]] = []
    for index in order:
        sequence = sequences[index]
        num = min(len(sequence), len(previous))
        differing = np.flatnonzero(sequence[:num] != previous[:num])
        order_and_prefixes.append((index, int(differing[0]) if len(differing) else num))
        previous = sequence
    return order_and_prefixes
