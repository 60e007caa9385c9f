"""Orders the requests that wait for a slot. Pure.

- A higher priority goes first, then an earlier training step, then the longest expected output:
  what a step waits for longest has to begin first. A request without a step (an evaluation, an API
  call) counts as the served version's.
- A request that has waited for half of its time goes before all others, so that none starves.
"""

from __future__ import annotations

import heapq
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from broker.contract import wire

Tokens = npt.NDArray[np.int32]
Rank = TypeVar("Rank")

WAITING: Final = -1  # GenerationJob.slot of a queued request
ENDED: Final = -2  # GenerationJob.slot of a request that has ended
LEAST_COMPACTED: Final = 32  # entries of a heap; below, looking through them saves too little


@dataclass(eq=False, slots=True)
class GenerationJob:
    """One request.

    Attributes:
        tokens: the whole context, shape (n,).
        expected_tokens: expected output length; the longest go first.
        min_version: oldest policy version that may serve it.
        submitted, deadline: seconds on the caller's clock.
        slot: where it runs, or WAITING or ENDED.
        priority: higher ones go first; only jobs of priority 0 make way for others.
        step: training step that waits for it, -1 unknown.
        resumable: whether its sender continues an output that ends early, as hubs do.
        expected_high: 0.9 quantile of the output length, 0 unknown.
        started: when it got its slot.
        max_tokens: most tokens that its output can have.
    """

    request_id: str
    conversation_id: str
    tokens: Tokens
    expected_tokens: int
    min_version: int
    submitted: float
    deadline: float
    slot: int = WAITING
    priority: int = 0
    step: int = -1
    resumable: bool = False
    expected_high: int = 0
    started: float = 0.0
    max_tokens: int = sys.maxsize

    @classmethod
    def of(cls, request: wire.GenerateRequest, now: float) -> GenerationJob:
        """Return the job of a request that arrives now."""
        expected = request.expected_tokens or request.sampling.max_tokens
        job = cls(
            request.request_id,
            request.conversation_id,
            request.token_ids.array(),
            expected_tokens=expected,
            min_version=request.min_version,
            submitted=now,
            deadline=now + request.deadline_s,
        )
        job.priority = request.priority
        job.step = request.step
        job.expected_high = request.expected_high
        job.max_tokens = request.sampling.max_tokens
        job.resumable = request.step >= 0 and request.sampling.is_resumable
        return job

    @property
    def urgent_at(self) -> float:
        """Time at which half of its time is spent."""
        return (self.submitted + self.deadline) / 2


class JobHeap(Generic[Rank]):
    """Jobs by rank, equals in the order of their arrival.

    A job that left elsewhere stays until it comes first or those that left outnumber the others: it
    holds its context, up to a megabyte, and may stand behind one that runs for an hour.

    Args:
        is_live: decides whether a job still belongs here; once False, always False.
    """

    def __init__(self, is_live: Callable[[GenerationJob], bool]) -> None:
        self._is_live = is_live
        self._entries: list[tuple[Rank, int, GenerationJob]] = []
        self._pushed = 0
        self._compact_at = LEAST_COMPACTED

    def __len__(self) -> int:
        return len(self._entries)

    def push(self, rank: Rank, job: GenerationJob) -> None:
        """Add a job."""
        self._pushed += 1
        heapq.heappush(self._entries, (rank, self._pushed, job))
        if len(self._entries) >= self._compact_at:
            self._entries = [entry for entry in self._entries if self._is_live(entry[2])]
            heapq.heapify(self._entries)
            self._compact_at = max(2 * len(self._entries), LEAST_COMPACTED)

    def first(self) -> tuple[Rank, GenerationJob] | None:
        """Return the first job and its rank."""
        while self._entries and not self._is_live(self._entries[0][2]):
            heapq.heappop(self._entries)
        return (self._entries[0][0], self._entries[0][2]) if self._entries else None

    def pop(self) -> None:
        """Remove the job that ``first`` returned."""
        heapq.heappop(self._entries)


class JobQueue:
    """Waiting jobs in two orders at once; a job taken from one has left the other."""

    def __init__(self) -> None:
        self.by_rank: JobHeap[tuple[int, int, int]] = JobHeap(_is_waiting)
        self.by_age: JobHeap[float] = JobHeap(_is_waiting)

    def push(self, job: GenerationJob, version: int) -> None:
        """Add a job while this version is served."""
        step = job.step if job.step >= 0 else version
        self.by_rank.push((-job.priority, step, -job.expected_tokens), job)
        self.by_age.push(job.urgent_at, job)

    def pop(self, now: float) -> GenerationJob | None:
        """Remove and return the first urgent job, else the first of all."""
        oldest = self.by_age.first()
        if oldest is not None and oldest[0] <= now:
            self.by_age.pop()
            return oldest[1]
        first = self.first()
        if first is not None:
            self.by_rank.pop()
        return first

    def first(self) -> GenerationJob | None:
        """Return the first job by rank."""
        entry = self.by_rank.first()
        return entry[1] if entry is not None else None


def _is_waiting(job: GenerationJob) -> bool:
    return job.slot == WAITING
