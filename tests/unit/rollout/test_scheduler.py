"""The scheduler by hand: order, versions, slots, prefixes, deadlines."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from broker.contract import wire
from rollout.job_queue import ENDED, LEAST_COMPACTED, GenerationJob
from rollout.scheduler import Scheduler, common_prefix


def tokens(*ids: int) -> np.ndarray:
    return np.array(ids, dtype=np.int32)


def job(
    name: str,
    *ids: int,
    conversation: str = "",
    expected: int = 1,
    version: int = 0,
    at: float = 0.0,
    until: float = 100.0,
    **more: Any,
) -> GenerationJob:
    context = tokens(*(ids or (1, 2, 3)))
    return GenerationJob(name, conversation or name, context, expected, version, at, until, **more)


def work(name: str, step: int, expected: int = 500, **more: Any) -> GenerationJob:
    """Return a job of a hub, which continues it."""
    return job(name, expected=expected, step=step, resumable=True, **more)


def started(scheduler: Scheduler, now: float = 0.0) -> list[str]:
    return [start.job.request_id for start in scheduler.admit(now)]


def test_the_longest_go_first_and_equals_in_order() -> None:
    scheduler = Scheduler(num_slots=8, max_running=8, version=0)
    for name, expected in (("a", 3), ("b", 9), ("c", 3), ("d", 5)):
        scheduler.submit(job(name, expected=expected))
    assert started(scheduler) == ["b", "d", "a", "c"]


def test_a_priority_goes_first_then_an_earlier_step_then_the_longest() -> None:
    scheduler = Scheduler(num_slots=8, max_running=8, version=4)
    for name, priority, step, expected in (
        ("next", 0, 5, 900), ("short", 0, 4, 10), ("evaluation", 0, -1, 50), ("long", 0, 4, 70),
        ("last of its group", 1, 5, 3), ("late", 0, 3, 1),
    ):  # fmt: skip
        scheduler.submit(job(name, expected=expected, priority=priority, step=step))
    assert started(scheduler) == [
        "last of its group",
        "late",
        "long",
        "evaluation",
        "short",
        "next",
    ]


def test_the_youngest_of_the_latest_step_makes_way_for_an_earlier_one() -> None:
    scheduler = Scheduler(num_slots=4, max_running=3, version=0, preempt_after_s=2.0)
    for at, one in enumerate((work("old", 2), work("young", 2), work("first", 1))):
        scheduler.submit(one)
        scheduler.admit(at)
    scheduler.submit(work("needed", 0, at=5.0))
    assert scheduler.next_preemption(5.0) == 7.0
    assert scheduler.preempt(6.9, lambda _: 0) is None
    way = scheduler.preempt(7.0, lambda _: 0)
    assert way is not None
    assert way.request_id == "young"
    assert scheduler.preempt(7.0, lambda _: 0) is None  # one at a time
    assert scheduler.next_preemption(7.0) is None
    scheduler.finish(way.slot, None)
    assert started(scheduler, 7.0) == ["needed"]


def test_who_never_makes_way() -> None:
    def yields(
        running: GenerationJob,
        waiting: GenerationJob,
        generated: int = 0,
        after: float | None = 0.0,
    ) -> bool:
        scheduler = Scheduler(num_slots=1, max_running=1, version=0, preempt_after_s=after)
        scheduler.submit(running)
        scheduler.admit(0.0)
        scheduler.submit(waiting)
        return scheduler.preempt(1.0, lambda _: generated) is running

    assert yields(work("a", 1), work("b", 0))
    assert not yields(work("a", 1), work("b", 0), after=None)  # off
    assert not yields(work("a", 1), work("b", 1, priority=1))  # of the same step
    assert not yields(work("a", 1, priority=1), work("b", 0))  # interrupted often enough
    assert not yields(job("a", step=1), work("b", 0))  # nobody continues it
    assert not yields(work("a", 1), job("b", expected=9999))  # of no step
    assert not yields(work("a", 1, expected=40), work("b", 0), generated=30)  # ends soon
    # outgrew it
    assert yields(work("a", 1, expected=40, expected_high=200), work("b", 0), generated=60)
    # near its limit
    assert not yields(work("a", 1, expected=512, max_tokens=512), work("b", 0), generated=510)
    assert not yields(work("a", 1, at=-10.0, until=10.0), work("b", 0))  # it would starve


def test_only_what_a_hub_continues_exactly_is_resumable() -> None:
    def resumable(step: int = 3, **sampling: Any) -> bool:
        params = wire.SamplingParams(max_tokens=8, **sampling)
        request = wire.GenerateRequest(
            request_id="r",
            conversation_id="c",
            token_ids=wire.column([1], "<i4"),
            sampling=params,
            step=step,
        )
        return GenerationJob.of(request, 0.0).resumable

    assert resumable(temperature=0.5, top_p=0.9, seed=1)
    assert not resumable(step=-1)
    assert not resumable(stop=["a"])  # it may begin in one output and end in the next
    assert not resumable(frequency_penalty=0.1)
    assert not resumable(logit_bias={1: 2.0})
    assert not resumable(top_logprobs=1)


def test_no_more_than_max_running_and_the_lowest_slots() -> None:
    scheduler = Scheduler(num_slots=4, max_running=2, version=0)
    for name in "abc":
        scheduler.submit(job(name))
    assert [(s.job.request_id, s.slot, s.reused) for s in scheduler.admit(0)] == [
        ("a", 0, 0),
        ("b", 1, 0),
    ]
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 1)
    scheduler.finish(0, None)
    assert [(s.job.request_id, s.slot) for s in scheduler.admit(0)] == [("c", 0)]


def test_a_request_that_spent_half_its_time_waiting_overtakes() -> None:
    scheduler = Scheduler(num_slots=1, max_running=1, version=0)
    scheduler.submit(job("short", expected=1, at=0, until=10))
    scheduler.submit(job("long", expected=99, at=4, until=104))
    assert started(scheduler, now=4.9) == ["long"]
    scheduler.finish(0, None)
    scheduler.submit(job("longer", expected=100, at=5, until=105))
    assert started(scheduler, now=5.0) == ["short"]


def test_min_version_waits_for_the_version() -> None:
    scheduler = Scheduler(num_slots=4, max_running=4)
    scheduler.submit(job("now", version=0))
    scheduler.submit(job("later", version=2))
    assert started(scheduler) == []  # no weights may be served yet
    scheduler.update(0)
    assert started(scheduler) == ["now"]
    scheduler.update(1)
    assert started(scheduler) == []
    scheduler.update(2)
    assert started(scheduler) == ["later"]


def test_going_back_a_version_holds_the_waiting_and_names_the_running() -> None:
    scheduler = Scheduler(num_slots=1, max_running=1, version=5)
    scheduler.submit(job("runs", version=5))
    scheduler.submit(job("waits", version=4))
    assert started(scheduler) == ["runs"]
    assert [j.request_id for j in scheduler.update(3)] == ["runs"]
    scheduler.finish(0, None)
    assert started(scheduler) == []
    scheduler.update(4)
    assert started(scheduler) == ["waits"]


def test_a_conversation_takes_its_slot_and_the_tokens_that_are_equal() -> None:
    scheduler = Scheduler(num_slots=2, max_running=2, version=0)
    scheduler.submit(job("a1", 1, 2, 3, conversation="a"))
    scheduler.admit(0)
    scheduler.finish(0, tokens(1, 2, 3, 4))
    scheduler.submit(job("b1", 1, 2, 3, 4, 9, conversation="b"))
    scheduler.submit(job("a2", 1, 2, 3, 4, 5, 6, conversation="a"))
    assert [(s.job.request_id, s.slot, s.reused) for s in scheduler.admit(0)] == [
        ("b1", 1, 0),
        ("a2", 0, 4),
    ]


def test_the_last_token_is_never_reused() -> None:
    scheduler = Scheduler(num_slots=1, max_running=1, version=0)
    scheduler.submit(job("a1", 1, 2, 3, conversation="a"))
    scheduler.admit(0)
    scheduler.finish(0, tokens(1, 2, 3))
    scheduler.submit(job("a2", 1, 2, 3, conversation="a"))
    assert scheduler.admit(0)[0].reused == 2


def test_a_changed_history_keeps_what_is_still_equal() -> None:
    scheduler = Scheduler(num_slots=1, max_running=1, version=0)
    scheduler.submit(job("a1", 1, 2, 3, 4, conversation="a"))
    scheduler.admit(0)
    scheduler.finish(0, tokens(1, 2, 3, 4))
    scheduler.submit(job("a2", 1, 2, 9, 4, 5, conversation="a"))
    assert scheduler.admit(0)[0].reused == 2


def test_idle_slots_go_least_recently_used_first_but_wanted_ones_last() -> None:
    scheduler = Scheduler(num_slots=3, max_running=3, version=0)
    for name in "abc":
        scheduler.submit(job(name))
    scheduler.admit(0)
    for slot in (1, 0, 2):  # b is the least recently used
        scheduler.finish(slot, tokens(1, 2, 3))
    scheduler.submit(job("x", expected=9))
    scheduler.submit(job("b2", 1, 2, 3, 4, conversation="b", expected=1))
    assert [(s.job.request_id, s.slot, s.reused) for s in scheduler.admit(0)] == [
        ("x", 0, 0),
        ("b2", 1, 3),
    ]


def test_new_weights_drop_idle_prefixes_and_taint_running_ones() -> None:
    scheduler = Scheduler(num_slots=3, max_running=3, version=0)
    for name in "abc":
        scheduler.submit(job(name))
    scheduler.admit(0)
    scheduler.finish(0, tokens(1, 2, 3))  # idle at the update
    scheduler.update(1)
    scheduler.refreshed(2)  # c's KV was rebuilt, b's was not
    scheduler.finish(1, tokens(1, 2, 3))
    scheduler.finish(2, tokens(1, 2, 3))
    for name in "abc":
        scheduler.submit(job(name + "2", 1, 2, 3, 4, conversation=name))
    assert {s.job.request_id: s.reused for s in scheduler.admit(0)} == {"a2": 0, "b2": 0, "c2": 3}


def test_the_same_weights_under_another_version_keep_the_prefixes() -> None:
    scheduler = Scheduler(num_slots=1, max_running=1, version=3)
    scheduler.submit(job("a1", conversation="a"))
    scheduler.admit(0)
    scheduler.finish(0, tokens(1, 2, 3))
    scheduler.update(3, weights_changed=False)
    scheduler.submit(job("a2", 1, 2, 3, 4, conversation="a"))
    assert scheduler.admit(0)[0].reused == 3


def test_without_prefix_cache_nothing_is_kept() -> None:
    scheduler = Scheduler(num_slots=1, max_running=1, prefix_cache=False, version=0)
    scheduler.submit(job("a1", conversation="a"))
    scheduler.admit(0)
    scheduler.finish(0, tokens(1, 2, 3))
    scheduler.submit(job("a2", 1, 2, 3, 4, conversation="a"))
    assert scheduler.admit(0)[0].reused == 0


def test_deadlines_end_the_waiting_and_name_the_running() -> None:
    scheduler = Scheduler(num_slots=1, max_running=1, version=0)
    scheduler.submit(job("runs", expected=9, until=5))
    scheduler.submit(job("waits", until=3))
    scheduler.submit(job("stays", until=9))
    assert started(scheduler) == ["runs"]
    assert scheduler.next_deadline() == 3
    due = scheduler.expire(5)
    assert [(j.request_id, j.slot) for j in due] == [("waits", ENDED), ("runs", 0)]
    scheduler.finish(0, None)
    assert started(scheduler, 5) == ["stays"]
    assert scheduler.expire(5) == []
    assert scheduler.next_deadline() == 9


def test_abort_and_unknown_and_twice() -> None:
    scheduler = Scheduler(num_slots=1, max_running=1, version=0)
    scheduler.submit(job("runs"))
    scheduler.submit(job("waits"))
    scheduler.admit(0)
    waits, runs = scheduler.abort("waits"), scheduler.abort("runs")
    assert waits is not None
    assert waits.slot == ENDED
    assert runs is not None
    assert runs.slot == 0
    assert scheduler.abort("waits") is None
    with pytest.raises(ValueError, match="'runs' is already running or waiting"):
        scheduler.submit(job("runs"))


def test_impossible_sizes() -> None:
    with pytest.raises(ValueError, match="max_running=3 must be between 1 and num_slots=2"):
        Scheduler(num_slots=2, max_running=3)


@pytest.mark.parametrize(
    ("a", "b", "n"),
    [
        ((1, 2, 3), (1, 2, 3), 3),
        ((1, 2), (1, 2, 3), 2),
        ((9,), (1,), 0),
        ((), (1,), 0),
        ((1, 5, 3), (1, 2, 3), 1),
    ],
)
def test_common_prefix(a: tuple[int, ...], b: tuple[int, ...], n: int) -> None:
    assert common_prefix(tokens(*a), tokens(*b)) == n


def scheduler_passed_by(
    others: Callable[[int], GenerationJob], *, running: bool
) -> tuple[Scheduler, int]:
    """Return a scheduler with one job that stays while 2,000 others come and end, and the contexts
    still in memory.
    """
    scheduler = Scheduler(
        num_slots=2, max_running=2 if running else 1, version=0, prefix_cache=False
    )
    if running:
        scheduler.submit(job("stays", until=1e4))
        scheduler.admit(0.0)
    else:
        scheduler.submit(job("stays", step=9, until=1e4))
    contexts = []
    for number in range(2000):
        other = others(number)
        contexts.append(weakref.ref(other.tokens))
        scheduler.submit(other)
        (start,) = scheduler.admit(float(number))
        assert start.job is other
        scheduler.finish(start.slot, None)
        scheduler.expire(float(number))
        del other, start
    return scheduler, sum(context() is not None for context in contexts)


@pytest.mark.parametrize("running", [True, False])
def test_ended_jobs_leave_memory_behind_one_that_stays(running: bool) -> None:
    scheduler, kept = scheduler_passed_by(
        lambda n: job(f"r{n}", step=0, at=n, until=n + 3e4), running=running
    )
    assert kept <= 2 * LEAST_COMPACTED
    assert scheduler.job("stays") is not None
    assert scheduler.next_deadline() == 1e4


def test_urgent_jobs_leave_memory_behind_a_higher_rank() -> None:
    held = job("held", version=1, until=1e4)
    scheduler, kept = scheduler_passed_by(
        lambda n: job(f"r{n}", step=9, at=n, until=float(n)), running=False
    )
    assert kept <= 2 * LEAST_COMPACTED
    scheduler.submit(held)
    assert [one.request_id for one in scheduler.expire(2e4)] == ["stays", "held"]
