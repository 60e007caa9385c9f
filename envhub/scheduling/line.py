"""Decides in which order groups begin in a hub: suspect ones only while the hub is idle. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class GroupJob:
    """What a ticket requires of the hub.

    Attributes:
        key: unique among the jobs in hand.
        max_staleness: versions that a token may lag behind before the group is late; None: never
            late.
        num_redundant: once all episodes but this many have finished, the group is complete.
        straggler_factor: the group closes with min_group_size episodes once the others are expected
            to take this many times as long again as it has taken; None: never.
        num_greedy: the last episodes are baselines, whose success does not count.
        pass_rate: bounds of the share of successes, outside of which the group is filtered; empty:
            none.
    """

    key: str
    group_size: int
    min_group_size: int
    deadline_s: float
    max_staleness: int | None = None
    num_delivered: int = 1
    num_redundant: int = 0
    straggler_factor: float | None = None
    num_greedy: int = 0
    pass_rate: tuple[float, ...] = ()


@dataclass
class _Waiting:
    job: GroupJob
    alone: bool | None  # None: not known yet


class GroupQueue:
    """Groups that were taken and have not begun, first come, first served.

    A suspect group begins when no other is in hand, and none begins while it is in hand. Groups
    behind an unjudged group wait, so that none can keep overtaking a suspect one.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, _Waiting] = {}
        self._alone = ""  # key of the suspect group in hand

    def __bool__(self) -> bool:
        """Return whether the hub must take no more tickets."""
        return bool(self._waiting or self._alone)

    def __contains__(self, key: str) -> bool:
        return key in self._waiting

    def jobs(self) -> Iterator[GroupJob]:
        """Return the groups that have not begun, in order."""
        return (entry.job for entry in self._waiting.values())

    def put(self, job: GroupJob, *, alone: bool | None) -> None:
        """Add a group at the end; ``alone`` is None until ``judge``."""
        self._waiting[job.key] = _Waiting(job, alone)

    def judge(self, key: str, *, alone: bool) -> None:
        """Set whether a group is suspect; does nothing if it has left."""
        if key in self._waiting:
            self._waiting[key].alone = alone

    def leave(self, key: str) -> None:
        """Remove a group that has ended, whether it had begun or not."""
        self._waiting.pop(key, None)
        if key == self._alone:
            self._alone = ""

    def next(self, *, idle: bool) -> GroupJob | None:
        """Remove and return the group that begins now, if any.

        Args:
            idle: whether the hub has ended and stored all others.
        """
        first = next(iter(self._waiting.values()), None)
        if first is None or self._alone or first.alone is None or (first.alone and not idle):
            return None
        del self._waiting[first.job.key]
        if first.alone:
            self._alone = first.job.key
        return first.job
