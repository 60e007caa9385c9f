"""Functions of this process as rewards."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from broker.settings.config import DomainSection, RewardConfig
from rewardhub.config import all_pools, own_pools
from rewardhub.function_pool import FunctionPool
from rewardhub.rewards.base import ResponseFault, Sample, Score, Scored
from rewardhub.rewards.caller import PREFIX
from rewardhub.score_dispatcher import ScoreDispatcher

SAMPLE = Sample(
    domain="main",
    task_index=0,
    prompt="question",
    response="four",
    reference="4",
    reward=0.0,
    reward_parts={},
    success=False,
    end="terminated",
    num_turns=1,
    num_tokens=2,
    metrics={},
)


def reward_of(name: str) -> RewardConfig:
    return RewardConfig(name=f"{PREFIX}{name}", pool="caller")


async def score_once(function: Score, timeout_s: float = 60.0) -> tuple[object, list[object]]:
    """The score, None where the hub is to end; and what was reported."""
    failures: list[object] = []
    failed = asyncio.Event()

    def report(name: str, error: BaseException) -> None:
        failures.append((name, error))
        failed.set()

    pool = FunctionPool({"own": function}, timeout_s, report)
    await pool.start()
    scoring = asyncio.create_task(pool.score(reward_of("own"), SAMPLE))
    failing = asyncio.create_task(failed.wait())
    await asyncio.wait({scoring, failing}, return_when=asyncio.FIRST_COMPLETED)
    await pool.close()
    scored = scoring.result() if scoring.done() else None
    for task in (scoring, failing):
        task.cancel()
    await asyncio.gather(scoring, failing, return_exceptions=True)
    assert pool.num_busy == 0
    return scored, failures


async def coroutine(sample: Sample) -> dict[str, float]:
    await asyncio.sleep(0)
    return {"length": float(len(sample.response))}


def at_fault(sample: Sample) -> float:
    raise ResponseFault("empty", -1.0)


@pytest.mark.parametrize(
    ("function", "scored"),
    [
        (lambda sample: len(sample.response), Scored(4.0)),
        (coroutine, Scored({"length": 4.0})),
        (at_fault, Scored(-1.0, {"empty": 1.0})),
    ],
)
async def test_functions_score(function: Score, scored: Scored) -> None:
    assert await score_once(function) == (scored, [])


def raiser(error: BaseException) -> Callable[[Sample], float]:
    def function(sample: Sample) -> float:
        raise error

    return function


@pytest.mark.parametrize(
    "error", [KeyError("x"), StopIteration(), SystemExit(3), KeyboardInterrupt(), MemoryError()]
)
async def test_a_failure_is_reported_with_its_error(error: BaseException) -> None:
    assert await score_once(raiser(error)) == (None, [("own", error)])


async def test_a_function_that_hangs_is_reported() -> None:
    never = threading.Event()
    scored, failures = await score_once(lambda sample: never.wait(), timeout_s=0.1)
    never.set()
    assert scored is None
    ((name, error),) = failures  # type: ignore[misc]
    assert (name, str(error)) == ("own", "no score within 0.1 s (rewardhub.timeout_s)")


async def test_a_value_that_is_no_number_is_reported() -> None:
    _, failures = await score_once(lambda sample: "much")
    ((_, error),) = failures  # type: ignore[misc]
    assert str(error) == "the reward must be a number, got str 'much'"


def test_other_hubs_leave_the_pool_alone() -> None:
    domain = DomainSection(env="qa", rewards=[reward_of("own"), RewardConfig(name="format")])
    assert all_pools({"main": domain}) == ["caller", "default"]
    assert own_pools({"main": domain}) == ["default"]


async def test_calls_come_one_after_the_other() -> None:
    running: list[int] = []
    most: list[int] = []

    def function(sample: Sample) -> float:
        running.append(1)
        most.append(len(running))
        running.pop()
        return 1.0

    pool = FunctionPool({"own": function}, 60.0, lambda name, error: None)
    scorers = ScoreDispatcher(
        {"domains.main.rewards.0": reward_of("own")},
        num_workers=8,
        timeout_s=60.0,
        memory_mib=None,
        gpu_numbers=(),
        functions=pool,
    )
    await scorers.start()
    assert (scorers.at_once, scorers.has_room([reward_of("own")])) == (1, True)
    scores = await asyncio.gather(*(scorers.score(reward_of("own"), SAMPLE) for _ in range(5)))
    await scorers.close()
    assert (scores, set(most), scorers.cpu_s()) == ([Scored(1.0)] * 5, {1}, 0.0)
