"""Assigns slices to ranks and puts their results in order; pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from learner.algorithm.samples import TrainSample
from learner.backends.ranks.messages import (
    SampleMessage,
    deal_slices,
    filler_sample,
    pack_sample,
    unpack_sample,
)

T = TypeVar("T")
# A slice, and whether it is trained.
Job = tuple[Sequence[TrainSample], bool]
# Index of a slice, None for a filler that trains nothing; whether it is trained.
Share = tuple[int | None, bool]


def deal_jobs(jobs: Sequence[Job], num: int, *, same_number: bool) -> list[list[Share]]:
    """Return the shares of ``num`` copies: slices that are trained, then the others.

    Args:
        same_number: whether fillers give all copies the same number of slices.
    """
    dealt: list[list[Share]] = [[] for _ in range(num)]
    # Dealt apart, because a slice that is trained costs more than one that is only measured.
    for kind in (True, False):
        indices = [index for index, (_, train) in enumerate(jobs) if train == kind]
        parts = deal_slices(
            [sum(sample.num_inputs for sample in jobs[index][0]) for index in indices], num
        )
        most = max(len(part) for part in parts)
        for shares, part in zip(dealt, parts, strict=True):
            shares += [(indices[index], kind) for index in part]
            if same_number:
                shares += [(None, kind)] * (most - len(part))
    return dealt


def pack_slices(jobs: Sequence[Job], shares: Sequence[Share]) -> list[list[SampleMessage]]:
    """Return one rank's slices as messages."""
    return [
        [] if index is None else [pack_sample(sample) for sample in jobs[index][0]]
        for index, _ in shares
    ]


def unpack_slices(slices: Sequence[Sequence[SampleMessage]]) -> list[list[TrainSample]]:
    """Return the samples of slices that were sent."""
    return [[unpack_sample(sample) for sample in part] or [filler_sample()] for part in slices]


def own_jobs(jobs: Sequence[Job], shares: Sequence[Share]) -> list[Job]:
    """Return one rank's jobs, to run here."""
    return [
        ([filler_sample()] if index is None else jobs[index][0], train) for index, train in shares
    ]


def merge_in_order(
    dealt: Sequence[Sequence[Share]], results_by_rank: Sequence[Sequence[T]]
) -> list[T]:
    """Return the results of the ranks in the order of the slices."""
    pairs = [
        pair
        for shares, results in zip(dealt, results_by_rank, strict=True)
        for pair in zip(shares, results, strict=True)
    ]
    by_index = {index: result for (index, _), result in pairs if index is not None}
    return [by_index[index] for index in sorted(by_index)]
