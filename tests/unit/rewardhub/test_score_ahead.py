"""Samples that are scored ahead of their group: only by idle workers, each score once."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from broker.contract import wire
from broker.runtime.spans import SpanRecorder
from broker.settings.config import DomainSection, RewardConfig
from rewardhub.reward_processes import BatchedRewardPool
from rewardhub.rewards import loading
from rewardhub.rewards.base import Scored
from rewardhub.routing import rewards_digest
from rewardhub.score_ahead import BUSY, AheadScorer
from rewardhub.score_dispatcher import ScoreDispatcher
from rewardhub.worker_pool import NoWorkerError, ScoreError

REWARDS = [
    RewardConfig(name="my.py:right", weight=2.0),
    RewardConfig(name="my.py:style", weight=0.5, pool="slow"),
    RewardConfig(name="my.py:brief", weight=-1.0),
]
REQUEST = wire.EpisodeScoreRequest(
    ticket=3, domain="qa", task_index=1, episode=2, prompt="q", reference="r", response="a", reward=0.5,
    reward_parts={}, success=False, end="terminated", metrics={}, num_turns=1, num_tokens=4,
)  # fmt: skip


class Scorers:
    """Two workers; a score takes until it is released."""

    def __init__(self) -> None:
        self.idle = 2
        self.asked: list[tuple[str, float]] = []
        self.release = asyncio.Event()
        self.error: Exception | None = None
        self.fails = {"my.py:brief"}
        self.value = 1.0

    def has_room(self, rewards: list[RewardConfig], promised: list[RewardConfig]) -> bool:
        return self.idle >= len(rewards) + len(promised)

    async def score(self, reward: RewardConfig, sample: Any) -> Scored:
        self.idle -= 1
        self.asked.append((reward.name, sample.reward))
        try:
            await self.release.wait()
            if self.error is not None and reward.name in self.fails:
                raise self.error
            return Scored(
                self.value if reward.name == "my.py:right" else {"a": 2.0, "b": 1.0}, {"note": 7.0}
            )
        finally:
            self.idle += 1


def ahead(scorers: Any, takes: bool = True) -> AheadScorer:
    bus: Any = None
    return AheadScorer(
        bus,
        scorers,
        lambda: {"qa": DomainSection(env="qa", rewards=REWARDS)},
        lambda _: takes,
        SpanRecorder(),
    )


async def test_a_pool_gives_the_scores_of_all_its_rewards_and_the_reward_with_them() -> None:
    scorers = Scorers()
    scorers.release.set()
    reply = await ahead(scorers).answer("default", REQUEST)
    assert reply == wire.EpisodeScoreReply(
        rewards=rewards_digest(REWARDS),
        scores=[
            wire.RewardScore(reward="right", value=1.0, notes={"note": 7.0}),
            wire.RewardScore(reward="brief", value={"a": 2.0, "b": 1.0}, notes={"note": 7.0}),
        ],
        reward=0.5 + 2.0 - 3.0,
        reward_parts={
            "right": 1.0,
            "right/note": 7.0,
            "brief/a": 2.0,
            "brief/b": 1.0,
            "brief/note": 7.0,
        },
        success=True,
    )


async def test_a_sample_is_refused_while_the_workers_have_others() -> None:
    scorers = Scorers()
    hub = ahead(scorers)
    first, second = (asyncio.create_task(hub.answer("default", REQUEST)) for _ in range(2))
    assert await second is BUSY  # also before the first has reached its workers
    assert await hub.answer("slow", REQUEST) is BUSY
    scorers.release.set()
    found = await first
    assert found is not None
    assert len(found.scores) == 2
    assert (await hub.answer("slow", REQUEST)) not in (None, BUSY)
    assert hub.num_scored == 2


@pytest.mark.parametrize("passes", [1, 2])
async def test_a_request_that_is_cancelled_leaves_room_for_the_next_one(passes: int) -> None:
    """After one pass of the loop the scores are about to begin, after two they have begun."""
    scorers = Scorers()
    hub = ahead(scorers)
    asking = asyncio.create_task(hub.answer("default", REQUEST))
    for _ in range(passes):
        await asyncio.sleep(0)
    assert len(scorers.asked) == (0 if passes == 1 else 2)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    scorers.release.set()
    assert len((await hub.answer("default", REQUEST)).scores) == 2


async def test_a_pool_that_takes_no_groups_takes_no_samples() -> None:
    assert await ahead(Scorers(), takes=False).answer("default", REQUEST) is BUSY


@pytest.mark.parametrize("error", [ScoreError("too slow", retry=True), NoWorkerError("no memory")])
async def test_a_failure_leaves_the_episode_to_its_group(error: Exception) -> None:
    scorers = Scorers()
    scorers.error = error
    scorers.release.set()
    scorers.fails = {"my.py:right", "my.py:brief"}
    hub = ahead(scorers)
    assert await hub.answer("default", REQUEST) == wire.EpisodeScoreReply()
    assert hub.num_scored == 0


async def test_a_failure_keeps_the_scores_of_other_rewards() -> None:
    scorers = Scorers()
    scorers.error = ScoreError("too slow", retry=True)
    scorers.release.set()
    hub = ahead(scorers)
    reply = await hub.answer("default", REQUEST)
    assert reply.partial
    assert reply.scores == [wire.RewardScore(reward="right", value=1.0, notes={"note": 7.0})]
    assert reply.rewards == rewards_digest(REWARDS)
    assert hub.num_scored == 0


@pytest.mark.parametrize("value", [1e308, None])
async def test_what_cannot_be_sent_or_computed_is_answered_without_scores(
    value: float | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Twice 1e308 is infinite; None: the dispatcher raises an error that it should not."""
    scorers = Scorers()
    scorers.error, scorers.value = (
        (KeyError("made to fail") if value is None else None),
        value or 0.0,
    )
    scorers.release.set()
    assert await ahead(scorers).answer("default", REQUEST) == wire.EpisodeScoreReply()
    assert ("made to fail" if value is None else "EpisodeScoreReply.reward") in caplog.text


async def test_a_domain_that_the_run_does_not_have_gets_no_scores() -> None:
    other = msgspec.structs.replace(REQUEST, domain="lake")
    assert await ahead(Scorers()).answer("default", other) == wire.EpisodeScoreReply()


async def test_requests_that_arrive_together_share_the_free_places_of_a_judge(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    judge = RewardConfig(name="my.py:judge")
    monkeypatch.setattr(
        loading, "concurrency_of", lambda _: loading.ConcurrencySettings(1, 9.0, on_gpu=False)
    )
    scorers = ScoreDispatcher(
        {"r": judge}, num_workers=1, timeout_s=9.0, memory_mib=None, gpu_numbers=[]
    )
    process, asked = asyncio.Event(), 0

    async def start(*_: Any) -> Any:
        nonlocal asked
        asked += 1
        await process.wait()
        raise NoWorkerError("made to fail")

    monkeypatch.setattr(BatchedRewardPool, "open_worker", start)
    bus: Any = None
    hub = AheadScorer(
        bus,
        scorers,
        lambda: {"qa": DomainSection(env="qa", rewards=[judge])},
        lambda _: True,
        SpanRecorder(),
    )
    asking = [asyncio.create_task(hub.answer("default", REQUEST)) for _ in range(6)]
    await asyncio.sleep(0.01)
    assert await hub.answer("default", REQUEST) is BUSY  # also once the first is being scored
    process.set()
    replies = await asyncio.gather(*asking)
    assert [one is BUSY for one in replies] == [False] + 5 * [True]
    assert asked == 1
    process.clear()
    again = asyncio.create_task(hub.answer("default", REQUEST))
    process.set()
    assert await again is not BUSY  # the place is free again
