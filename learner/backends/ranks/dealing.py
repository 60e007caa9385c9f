"""Slices dealt out to ranks, and what became of them put in order. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from learner.algorithm.samples import TrainSample
from learner.backends.ranks.messages import Sample, deal, filler, pack, unpack

T = TypeVar("T")
Job = tuple[Sequence[TrainSample], bool]  # a slice, and whether it is trained
Share = tuple[int | None, bool]  # which of the slices, None for one that only keeps the others company; whether it is trained


def deal_jobs(jobs: Sequence[Job], num: int, *, same_number: bool) -> list[list[Share]]:
    """What each of ``num`` takes: those that are trained, then the others.

    Args:
        same_number: all take as many, be it of nothing.
    """
    dealt: list[list[Share]] = [[] for _ in range(num)]
    for kind in (True, False):
        indices = [index for index, (_, train) in enumerate(jobs) if train == kind]
        parts = deal([sum(sample.num_inputs for sample in jobs[index][0]) for index in indices], num)
        most = max(len(part) for part in parts)
        for shares, part in zip(dealt, parts, strict=True):
            shares += [(indices[index], kind) for index in part]
            shares += [(None, kind)] * (most - len(part) if same_number else 0)
    return dealt


def packed(jobs: Sequence[Job], shares: Sequence[Share]) -> list[list[Sample]]:
    """One rank's, to send them."""
    return [[] if index is None else [pack(sample) for sample in jobs[index][0]] for index, _ in shares]


def unpacked(slices: Sequence[Sequence[Sample]]) -> list[list[TrainSample]]:
    """As they were."""
    return [[unpack(sample) for sample in part] or [filler()] for part in slices]


def own(jobs: Sequence[Job], shares: Sequence[Share]) -> list[Job]:
    """One rank's, to do them here."""
    return [([filler()] if index is None else jobs[index][0], train) for index, train in shares]


def in_order(dealt: Sequence[Sequence[Share]], done: Sequence[Sequence[T]]) -> list[T]:
    """What the ranks made of the slices, in the order of the slices."""
    pairs = [pair for shares, results in zip(dealt, done, strict=True) for pair in zip(shares, results, strict=True)]
    found = {index: result for (index, _), result in pairs if index is not None}
    return [found[index] for index in sorted(found)]
