"""Decides which request runs next and in which KV slot: a pure state machine without I/O or clock.

- ``rollout.job_queue`` orders the waiting requests.
- A request waits until the served version is at least its ``min_version``.
- If no slot is free and a request of an earlier step has waited for ``preempt_after_s``, the
  youngest running request of a later step makes way: it ends with its output so far, and its hub
  continues it, elsewhere or later.
- A finished conversation's slot stays idle. A later request of that conversation takes it and
  reuses the common prefix. Idle slots are evicted least recently used first, those that a waiting
  request can reuse last.
- New weights drop every idle slot; a slot that is running then is not kept when it finishes, unless
  its KV was rebuilt.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from broker.contract.lengths import remaining_tokens
from rollout.job_queue import ENDED, WAITING, GenerationJob, JobHeap, JobQueue, Tokens

# a job with at most this many tokens still to come keeps its slot: reading it again costs more
ENDS_SOON: Final = 32


@dataclass(frozen=True, slots=True)
class JobStart:
    """Instruction to run a job in a slot, which already holds the KV of its first ``reused``
    tokens.
    """

    job: GenerationJob
    slot: int
    reused: int


@dataclass(frozen=True, slots=True)
class _Idle:
    conversation_id: str
    tokens: Tokens  # whose KV the slot holds


class Scheduler:
    """Queue, slots and prefixes of one engine.

    Args:
        num_slots: KV slots; at least 1.
        max_running: concurrent jobs, at most ``num_slots``.
        prefix_cache: whether finished conversations keep their slot.
        version: served policy version, -1 for none.
        preempt_after_s: how long a job waits before one of a later step makes way for it; None:
            none ever does.
        whole_prefixes: a slot's tokens can only be reused all together, as with recurrent states.
    """

    def __init__(
        self,
        *,
        num_slots: int,
        max_running: int,
        prefix_cache: bool = True,
        version: int = -1,
        preempt_after_s: float | None = None,
        whole_prefixes: bool = False,
    ) -> None:
        if not 1 <= max_running <= num_slots:
            raise ValueError(
                f"max_running={max_running} must be between 1 and num_slots={num_slots}"
            )
        self.num_slots = num_slots
        self.max_running = max_running
        self.prefix_cache = prefix_cache
        self.version = version
        self.preempt_after_s = preempt_after_s
        self._whole_prefixes = whole_prefixes
        self._leaving: GenerationJob | None = None  # makes way, and has not ended yet
        self._jobs: dict[str, GenerationJob] = {}
        self._running: dict[int, GenerationJob] = {}
        self._queue = JobQueue()
        self._held: list[GenerationJob] = []  # waiting for a version
        self._deadlines: JobHeap[float] = JobHeap(lambda job: job.slot != ENDED)
        self._free = list(range(num_slots))
        self._idle: OrderedDict[int, _Idle] = OrderedDict()  # least recently used first
        self._idle_of: dict[str, int] = {}  # conversation to its idle slot
        self._wanted: Counter[str] = Counter()  # conversations of waiting jobs
        self._stale: set[int] = set()  # running slots whose KV is of older weights

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._jobs) - len(self._running)

    @property
    def running(self) -> list[GenerationJob]:
        """The running jobs, by slot."""
        return [self._running[slot] for slot in sorted(self._running)]

    def job(self, request_id: str) -> GenerationJob | None:
        """Return a waiting or running job."""
        return self._jobs.get(request_id)

    def submit(self, job: GenerationJob) -> None:
        """Queue a job.

        Raises:
            ValueError: if its request_id is already running or waiting.
        """
        if job.request_id in self._jobs:
            raise ValueError(f"request_id {job.request_id!r} is already running or waiting")
        job.slot = WAITING
        self._jobs[job.request_id] = job
        self._wanted[job.conversation_id] += 1
        self._deadlines.push(job.deadline, job)
        self._enqueue(job)

    def admit(self, now: float) -> list[JobStart]:
        """Start as many jobs as fit and return them in order of priority."""
        starts: list[JobStart] = []
        while len(self._running) < self.max_running:
            job = self._queue.pop(now)
            if job is None:
                break
            starts.append(self._start(job, now))
        return starts

    def preempt(
        self, now: float, generated: Callable[[GenerationJob], int]
    ) -> GenerationJob | None:
        """Return a running job that makes way for a waiting one, if any must; the caller ends it
        with its output.

        One makes way at a time, only for a job of an earlier step, and never one with a priority,
        so a hub bounds how often a turn is interrupted by raising its priority. One that soon ends
        by itself stays, and one that started because it had waited for half of its time.

        Args:
            generated: returns the tokens of a running job's output so far.
        """
        first, due_at = self._kept_waiting()
        if first is None or due_at > now:
            return None
        able = [
            job
            for job in self._running.values()
            if job.resumable and not job.priority and job.step > first.step
        ]
        able = [job for job in able if job.started < job.urgent_at]  # the others would starve
        for job in sorted(able, key=lambda job: (-job.step, -job.started, job.slot)):
            count = generated(job)
            if (
                remaining_tokens(
                    job.expected_tokens, job.expected_high, count, job.max_tokens - count
                )[0]
                > ENDS_SOON
            ):
                self._leaving = job
                return job
        return None

    def next_preemption(self, now: float) -> float | None:
        """Return the time after ``now`` at which ``preempt`` should be called, if nothing ends or
        arrives before.
        """
        first, due_at = self._kept_waiting()
        return due_at if first is not None and due_at > now else None

    def expire(self, now: float) -> list[GenerationJob]:
        """Return the jobs past their deadline; waiting ones are removed, the caller must ``finish``
        running ones.
        """
        expired_jobs: list[GenerationJob] = []
        while (entry := self._deadlines.first()) is not None and entry[0] <= now:
            self._deadlines.pop()
            job = entry[1]
            expired_jobs.append(job)
            if job.slot == WAITING:
                self._leave(job)
        return expired_jobs

    def abort(self, request_id: str) -> GenerationJob | None:
        """Return a job, None if unknown, and remove it if it waits; the caller must ``finish`` a
        running one.
        """
        job = self._jobs.get(request_id)
        if job is not None and job.slot == WAITING:
            self._leave(job)
        return job

    def next_deadline(self) -> float | None:
        """Return the earliest deadline of any job."""
        entry = self._deadlines.first()
        return entry[0] if entry is not None else None

    def finish(self, slot: int, tokens: Tokens | None) -> None:
        """End the job in a slot; ``tokens`` are those whose KV the slot now holds, None to drop
        them.
        """
        job = self._running.pop(slot)
        del self._jobs[job.request_id]
        job.slot = ENDED
        if job is self._leaving:
            self._leaving = None
        stale = slot in self._stale
        self._stale.discard(slot)
        if self.prefix_cache and tokens is not None and len(tokens) and not stale:
            self._forget(self._idle_of.get(job.conversation_id))
            self._idle[slot] = _Idle(job.conversation_id, tokens)
            self._idle_of[job.conversation_id] = slot
        else:
            heapq.heappush(self._free, slot)

    def update(self, version: int, *, weights_changed: bool = True) -> list[GenerationJob]:
        """Serve a new version from now on.

        Returns:
            Running jobs that must not continue because the new version is below their
            ``min_version`` (a learner that went back to a checkpoint); the caller must finish them.
        """
        self.version = version
        if weights_changed:
            self.drop_prefixes()
            self._stale.update(self._running)
        waiting = [job for job in self._jobs.values() if job.slot == WAITING]
        self._queue = JobQueue()
        self._held = []
        for job in waiting:
            self._enqueue(job)
        return [job for job in self.running if job.min_version > version]

    def drop_prefixes(self) -> None:
        """Forget what idle slots hold."""
        for slot in list(self._idle):
            self._forget(slot)

    def refreshed(self, slot: int) -> None:
        """Note that a running slot's KV was rebuilt from the newest weights."""
        self._stale.discard(slot)

    def _kept_waiting(self) -> tuple[GenerationJob | None, float]:
        """Return the job that another may make way for, and from when on."""
        if (
            self.preempt_after_s is None
            or self._leaving is not None
            or len(self._running) < self.max_running
        ):
            return None, 0.0
        first = self._queue.first()
        if first is None or first.step < 0:
            return None, 0.0
        return first, first.submitted + self.preempt_after_s

    def _enqueue(self, job: GenerationJob) -> None:
        if job.min_version <= self.version and self.version >= 0:
            self._queue.push(job, self.version)
        else:
            self._held.append(job)

    def _leave(self, job: GenerationJob) -> None:
        del self._jobs[job.request_id]
        if job.slot == WAITING:
            self._unwant(job)
        job.slot = ENDED
        if job in self._held:
            self._held.remove(job)

    def _unwant(self, job: GenerationJob) -> None:
        self._wanted[job.conversation_id] -= 1
        if not self._wanted[job.conversation_id]:
            del self._wanted[job.conversation_id]

    def _start(self, job: GenerationJob, now: float) -> JobStart:
        slot = self._idle_of.get(job.conversation_id)
        reused = 0
        if slot is not None:
            tokens = self._idle[slot].tokens
            reused = common_prefix(tokens, job.tokens[:-1])  # the last one must produce logits
            if self._whole_prefixes and reused < len(tokens):
                reused = 0
            self._forget(slot)
        elif not self._free:
            self._forget(self._victim())
        if slot is None:
            slot = self._free[0]
        self._free.remove(slot)
        heapq.heapify(self._free)
        self._unwant(job)
        self._running[slot] = job
        job.slot = slot
        job.started = now
        return JobStart(job, slot, reused)

    def _victim(self) -> int:
        unwanted = (
            slot for slot, idle in self._idle.items() if idle.conversation_id not in self._wanted
        )
        return next(unwanted, next(iter(self._idle)))

    def _forget(self, slot: int | None) -> None:
        if slot is not None:
            idle = self._idle.pop(slot)
            del self._idle_of[idle.conversation_id]
            heapq.heappush(self._free, slot)


def common_prefix(a: Tokens, b: Tokens) -> int:
    """Return the number of equal leading tokens."""
    n = min(len(a), len(b))
    different = np.flatnonzero(a[:n] != b[:n])
    return int(different[0]) if different.size else n
