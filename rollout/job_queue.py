"""Orders the requests that wait for a slot. Pure.

- A higher priority goes first, then an earlier training step, then the longest expected output: what a step waits for
  longest has to begin first. A request without a step (an evaluation, an API call) counts as the served version's.
- A request that has waited for half of its time goes before all others, so that none starves.
"""

from __future__ import annotations

import heapq
import sys
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from broker.contract import wire

Tokens = npt.NDArray[np.int32]

WAITING: Final = -1  # GenerationJob.slot of a queued request
ENDED: Final = -2  # GenerationJob.slot of a request that has ended


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
        identity, until = (request.request_id, request.conversation_id), now + request.deadline_s
        expected = request.expected_tokens or request.sampling.max_tokens
        job = cls(*identity, request.token_ids.array(), expected, request.min_version, now, until)
        job.priority, job.step, job.expected_high = request.priority, request.step, request.expected_high
        job.max_tokens = request.sampling.max_tokens
        job.resumable = request.step >= 0 and request.sampling.is_resumable
        return job

    @property
    def urgent_at(self) -> float:
        """Time at which half of its time is spent."""
        return (self.submitted + self.deadline) / 2


@dataclass(eq=False, slots=True)
class JobQueue:
    """Waiting jobs in two orders at once; a job taken from one is skipped in the other."""

    _ranked: list[tuple[tuple[int, int, int], int, GenerationJob]] = field(default_factory=list)
    _oldest: list[tuple[float, int, GenerationJob]] = field(default_factory=list)
    _pushed: int = 0

    def push(self, job: GenerationJob, version: int) -> None:
        """Add a job while this version is served."""
        self._pushed += 1
        rank = -job.priority, job.step if job.step >= 0 else version, -job.expected_tokens
        heapq.heappush(self._ranked, (rank, self._pushed, job))
        heapq.heappush(self._oldest, (job.urgent_at, self._pushed, job))

    def pop(self, now: float) -> GenerationJob | None:
        """Remove and return the first urgent job, else the first of all."""
        while self._oldest and (self._oldest[0][2].slot != WAITING or self._oldest[0][0] <= now):
            job = heapq.heappop(self._oldest)[2]
            if job.slot == WAITING:
                return job
        first = self.first()
        if first is not None:
            heapq.heappop(self._ranked)
        return first

    def first(self) -> GenerationJob | None:
        """Return the first job by rank."""
        while self._ranked and self._ranked[0][2].slot != WAITING:
            heapq.heappop(self._ranked)
        return self._ranked[0][2] if self._ranked else None
