"""The scheduler under any interleaving: no slot twice, no stale prefix, no request lost, none
before its version.
"""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from broker.contract.lengths import remaining_tokens
from rollout.job_queue import ENDED, WAITING, GenerationJob
from rollout.scheduler import ENDS_SOON, Scheduler

SLOTS, RUNNING, AFTER_S = 5, 3, 1.0


class Machine(RuleBasedStateMachine):
    """A model beside the scheduler: which job is where, and from which weights the KV of each slot
    comes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = Scheduler(
            num_slots=SLOTS, max_running=RUNNING, version=0, preempt_after_s=AFTER_S
        )
        self.leaving: GenerationJob | None = None
        self.now = 0.0
        self.weights = 0  # counts loads
        self.jobs: list[GenerationJob] = []
        # slot: (token, weights it was computed with)
        self.held: dict[int, list[tuple[int, int]]] = {}
        self.histories: dict[str, list[int]] = {}

    @rule(conversation=st.sampled_from("abcd"), new=st.lists(st.integers(0, 2), min_size=1, max_size=4),
        fresh=st.booleans(),
          expected=st.integers(1, 99), ahead=st.integers(0, 2), time=st.floats(0.5, 20),
          step=st.integers(-1, 2), priority=st.integers(0, 1))  # fmt: skip
    def submit(
        self, conversation: str, new: list[int], fresh: bool, expected: int, ahead: int, time: float, step: int,
        priority: int,
    ) -> None:  # fmt: skip
        history = ([] if fresh else self.histories.get(conversation, [])) + new
        self.histories[conversation] = history
        job = GenerationJob(f"r{len(self.jobs)}", conversation, np.array(history, np.int32), expected,
                  max(0, self.scheduler.version + ahead - 1), self.now, self.now + time,
                  priority=priority, step=step, resumable=step >= 0)  # fmt: skip
        self.jobs.append(job)
        self.scheduler.submit(job)

    @rule()
    def admit(self) -> None:
        free = RUNNING - self.scheduler.num_running
        able = [
            j for j in self.jobs if j.slot == WAITING and j.min_version <= self.scheduler.version
        ]
        urgent = [j for j in able if j.urgent_at <= self.now]
        starts = self.scheduler.admit(self.now)
        assert len(starts) == min(free, len(able))
        assert all(start.job in able for start in starts)
        if urgent and starts:
            assert starts[0].job.urgent_at == min(j.urgent_at for j in urgent)
        if not urgent:
            chosen = [self.rank(start.job) for start in starts]
            assert chosen == sorted(self.rank(j) for j in able)[: len(chosen)]
        for start in starts:
            tokens = start.job.tokens.tolist()
            assert start.reused < len(tokens)
            kept = self.held.get(start.slot, [])[: start.reused]
            # equal tokens, and of these weights
            assert kept == [(token, self.weights) for token in tokens[: start.reused]]
            self.held[start.slot] = [(token, self.weights) for token in tokens]

    def rank(self, job: GenerationJob) -> tuple[int, int, int]:
        step = job.step if job.step >= 0 else self.scheduler.version
        return -job.priority, step, -job.expected_tokens

    @rule(generated=st.integers(0, 200))
    def preempt(self, generated: int) -> None:
        able = [
            j for j in self.jobs if j.slot == WAITING and j.min_version <= self.scheduler.version
        ]
        first = min(able, key=self.rank, default=None)
        job = self.scheduler.preempt(self.now, lambda _: generated)
        if job is None:
            return
        assert self.leaving is None or self.leaving.slot == ENDED  # one at a time
        assert first is not None
        assert self.scheduler.num_running == RUNNING
        assert self.now >= first.submitted + AFTER_S
        assert job.slot >= 0
        assert job.step > first.step >= 0
        assert job.priority == 0
        left = [
            (j, remaining_tokens(j.expected_tokens, 0, generated, 10**9)[0])
            for j in self.scheduler.running
        ]
        able = [j for j, tokens in left if j.resumable and not j.priority and tokens > ENDS_SOON]
        assert job in able
        assert job.step == max(j.step for j in able)
        self.leaving = job

    @precondition(lambda self: self.scheduler.num_running)
    @rule(pick=st.integers(0, RUNNING - 1), keep=st.booleans())
    def finish(self, pick: int, keep: bool) -> None:
        job = self.scheduler.running[pick % self.scheduler.num_running]
        slot = job.slot
        self.scheduler.finish(
            slot, np.array([token for token, _ in self.held[slot]], np.int32) if keep else None
        )
        assert job.slot == ENDED

    @rule(step=st.integers(-1, 2), recompute=st.booleans())
    def update(self, step: int, recompute: bool) -> None:
        self.weights += 1
        version = max(0, self.scheduler.version + step)
        running = {j.request_id for j in self.scheduler.running if j.min_version > version}
        stopped = self.scheduler.update(version)
        assert {j.request_id for j in stopped} == running
        for job in stopped:
            self.scheduler.finish(job.slot, None)
        if recompute:
            for job in self.scheduler.running:
                self.held[job.slot] = [(token, self.weights) for token, _ in self.held[job.slot]]
                self.scheduler.refreshed(job.slot)

    @rule(pick=st.integers(0, 30))
    def abort(self, pick: int) -> None:
        job = self.scheduler.abort(f"r{pick}")
        expected = next(
            (j for j in self.jobs if j.request_id == f"r{pick}" and (j is job or j.slot != ENDED)),
            None,
        )
        assert job is expected
        if job is not None and job.slot >= 0:
            self.scheduler.finish(job.slot, None)

    @rule(seconds=st.floats(0, 10))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        late = {j.request_id for j in self.jobs if j.slot != ENDED and j.deadline <= self.now}
        due = self.scheduler.expire(self.now)
        assert {j.request_id for j in due} == late
        for job in due:
            if job.slot >= 0:
                self.scheduler.finish(job.slot, None)

    @invariant()
    def nothing_is_lost(self) -> None:
        waiting = [j for j in self.jobs if j.slot == WAITING]
        running = [j for j in self.jobs if j.slot >= 0]
        assert (self.scheduler.num_waiting, self.scheduler.num_running) == (
            len(waiting),
            len(running),
        )
        assert len({j.slot for j in running}) == len(running) <= RUNNING
        assert all(0 <= j.slot < SLOTS and j.min_version <= self.scheduler.version for j in running)
        deadlines = [j.deadline for j in waiting + running]
        assert self.scheduler.next_deadline() == (min(deadlines) if deadlines else None)


TestScheduler = Machine.TestCase
TestScheduler.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
