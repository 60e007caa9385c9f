"""Episodes are scored before their group is complete: by real hubs, once each, and whatever becomes
of the scores.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from envhub_world import KIT, LAKE, World
from msgspec.structs import replace
from waits import until

from broker.contract import wire
from broker.contract.streams import DEAD, EPISODES, SCORES
from broker.identity.login import find_login
from broker.jetstream.bus import Bus
from broker.jetstream.core_messages import answer_requests
from broker.settings.config import DomainSection, RewardConfig
from envhub.task import EpisodeResult
from envhub.tickets.assignment import assignment, group
from envhub.tickets.early_scores import EarlyScores, score_request
from rewardhub.episode_samples import sample_of, sample_of_request

FUNCTIONS = str(Path(__file__).parents[1] / "kit" / "reward_functions.py")
REWARDHUB = ("-m", "rewardhub.cli")
SIZE = 4


@pytest.fixture
async def world(bus: Bus, broker_url: str, tmp_path: Path) -> AsyncIterator[World]:
    made = World(bus, broker_url, tmp_path)
    yield made
    await made.close()


@pytest.fixture
async def silent(bus: Bus, broker_url: str) -> AsyncIterator[list[wire.Message]]:
    """A reward hub that accepts requests for scores and never answers; what it was asked."""
    asked: list[wire.Message] = []

    async def swallow(message: wire.Message) -> None:
        asked.append(message)

    login = find_login(broker_url, "rewardhub", bus.run)
    hub = await Bus.connect(
        broker_url, bus.run, name="silent", role="rewardhub", login=login, deadline_s=60
    )
    swallowing = await answer_requests(hub, SCORES, "default", swallow, shared=True)
    await hub.link.overdue(1.0)
    yield asked
    await swallowing.close()
    await hub.close()


def done(folder: Path) -> int:
    return len(list(folder.glob("*.done")))


async def prepare(
    world: World, *, pools: tuple[str, ...] = ("default",), seconds: float = 0.0, **domain: Any
) -> None:
    """A domain whose rewards give an episode's turns; the last episode of a group ends when
    ``release`` is there.
    """
    rewards = [
        {
            "name": f"{FUNCTIONS}:slow",
            "pool": pool,
            "args": {"folder": str(world.folder), "seconds": seconds},
        }
        for pool in pools
    ]
    envhub = {"drain_timeout_s": 10, "score_wait_s": 1.5}
    await world.publish_spec(
        {"lake": {**LAKE, "max_turns": 1, "rewards": rewards, **domain}},
        sections={"envhub": envhub, "rewardhub": {"workers": 2}},
    )

    async def last() -> str:
        await until((world.folder / "release").exists)
        return "R"

    await world.server(
        script=lambda request, _: last() if f".{SIZE - 1}." in request.conversation_id else "R"
    )


async def test_episodes_are_scored_while_their_group_is_played_and_never_twice(
    world: World,
) -> None:
    await prepare(world, pools=("first", "second"))
    for name in ("rewards1", "rewards2"):
        world.spawn("--id", name, program=REWARDHUB)
    number = await world.ticket(group_size=SIZE)
    async with world.hub("--n", "8"):
        # both pools, for all that have ended
        await until(lambda: done(world.folder) == 2 * (SIZE - 1))
        (world.folder / "release").touch()
        record = (await world.groups(1))[number]
        await world.settled()
    assert done(world.folder) == 2 * SIZE
    assert record.scores == []
    assert len(record.reward_hubs) == 2
    assert set(record.reward_hubs) <= {"rewards1", "rewards2"}
    for one in record.trajectories:
        own = one.reward_parts["env"]
        assert one.reward_parts == {"env": own, "slow": 1.0, "slow_2": 1.0}
        assert one.reward == own + 2.0


async def test_a_domain_may_have_its_episodes_scored_together(world: World) -> None:
    await prepare(world, score_ahead=False)
    world.spawn("--id", "rewards1", program=REWARDHUB)
    number = await world.ticket(group_size=SIZE)
    async with world.hub("--n", "8"):
        await until(lambda: len(world.servers[0].asked) == SIZE)
        await asyncio.sleep(0.5)
        assert done(world.folder) == 0
        (world.folder / "release").touch()
        record = (await world.groups(1))[number]
        await world.settled()
    assert done(world.folder) == SIZE
    assert [one.reward_parts["slow"] for one in record.trajectories] == [1.0] * SIZE


async def test_a_reward_hub_that_dies_costs_its_scores_only_time(world: World) -> None:
    await prepare(world, seconds=3.0)
    doomed = world.spawn("--id", "rewards1", program=REWARDHUB)
    number = await world.ticket(group_size=SIZE)
    async with world.hub("--n", "8"):
        await until(lambda: len(list(world.folder.glob("*.began"))) == 2)  # its two workers
        doomed.send_signal(signal.SIGKILL)
        (world.folder / "release").touch()
        world.spawn("--id", "rewards2", program=REWARDHUB)
        record = (await world.groups(1))[number]
        await world.settled()
    assert record.reward_hubs == ["rewards2"]
    assert [one.reward_parts["slow"] for one in record.trajectories] == [1.0] * SIZE


async def test_a_group_waits_for_scores_on_their_way_but_not_for_ever(
    world: World, silent: list[wire.Message]
) -> None:
    """A process that accepts samples and never scores them holds a group for envhub.score_wait_s."""
    await prepare(world)
    number = await world.ticket(group_size=SIZE)
    loop = asyncio.get_running_loop()
    async with world.hub("--n", "8"):
        await until(lambda: len(silent) == SIZE - 1)
        (world.folder / "release").touch()
        began = loop.time()
        queue = await world.bus.work_queue(EPISODES, "default")
        (delivery,) = await queue.fetch(1, 30)
        took = loop.time() - began
        await delivery.ack()
        await world.settled()
    assert 1.4 < took < 10
    assert isinstance(delivery.message, wire.Group)
    assert (delivery.message.ticket, delivery.message.scores) == (number, [])


async def test_a_stopping_hub_publishes_a_complete_group_without_waiting_for_scores(
    world: World, silent: list[wire.Message]
) -> None:
    await prepare(world)
    await world.ticket(group_size=SIZE)
    async with world.hub("--n", "8") as stop:
        await until(lambda: len(silent) == SIZE - 1)
        stop.request("test")
        await asyncio.sleep(0.2)
        (world.folder / "release").touch()
        await world.settled()
    assert sum((await world.bus.depth(EPISODES)).values()) == 1


async def test_a_group_that_is_certain_to_be_filtered_is_closed_while_it_is_played(
    world: World,
) -> None:
    await prepare(world)  # no episode reaches the goal in one turn, and the last one never ends
    closing = await world.ticket(group_size=SIZE, pass_rate=[0.3, 1.0])
    async with world.hub("--n", "8"):
        (record,) = await world.records(1)
        await world.settled()
        server = world.servers[0]
        (running,) = [
            one.request_id for one in server.asked if f".{SIZE - 1}." in one.conversation_id
        ]
        await until(lambda: server.aborted == [running])
    assert isinstance(record, wire.Closed)
    assert (record.ticket, record.reason) == (closing, "filtered")
    assert record.detail == "0 of 3 episodes succeeded, 1 open; pass_rate 0.3 to 1"
    assert sum((await world.bus.depth(DEAD)).values()) == 0


async def test_a_success_that_a_reward_decides_closes_its_group_too(world: World) -> None:
    """Without a reward of the environment the first reward's score of at least 1 is a success."""
    await prepare(world, env=f"{KIT}:Unrewarded")
    world.spawn("--id", "rewards1", program=REWARDHUB)
    closing = await world.ticket(group_size=SIZE, pass_rate=[0.0, 0.5])
    async with world.hub("--n", "8"):
        (record,) = await world.records(1)
        await world.settled()
    assert (record.ticket, record.reason) == (closing, "filtered")
    assert record.detail == "3 of 3 episodes succeeded, 1 open; pass_rate 0 to 0.5"


def trajectory(turns: int, reward: float) -> wire.Trajectory:
    n = 2 * turns + 1
    return wire.Trajectory(
        episode=3,
        token_ids=wire.column(range(n), "<i4"),
        loss_mask=wire.column([0] + [1] * (n - 1), "|u1"),
        logprobs=wire.column([0] + [-1] * (n - 1), "<f4"),
        version_runs=wire.column([4, n - 1], "<i4"),
        turns=[
            wire.Turn(
                start=2 * i + 1,
                end=2 * i + 3,
                reward=0.5,
                valid=True,
                finish_reason="stop",
                server="r",
            )
            for i in range(turns)
        ],
        reward=reward,
        reward_parts={"env": reward},
        success=True,
        end="truncated",
        response=f"after {turns}",
        metrics={"moves": 2.0},
    )


TICKET = wire.Ticket(
    number=7, domain="qa", task_index=5, seed=1, min_version=0, max_staleness=1, group_size=4, min_group_size=4,
    deadline_s=60.0,
)  # fmt: skip


def test_a_reward_sees_the_same_sample_before_and_with_its_group() -> None:
    played = EpisodeResult(
        [trajectory(1, 0.0), trajectory(2, 1.5)], "question", "answer", 1.0, 0.1, []
    )
    asked = assignment(TICKET)
    complete = group(asked, [played], pools=["default"], hub="h", deliveries=1, temperature=1.0)
    expected = sample_of(complete, complete.trajectories[-1])
    assert sample_of_request(score_request(asked, played)) == expected
    assert (expected.num_turns, expected.num_tokens, expected.reward) == (3, 6, 1.5)


@pytest.mark.parametrize(("size", "is_scored"), [(300_000, True), (9 << 20, False)])
async def test_a_long_answer_is_scored_early_unless_no_message_can_hold_it(
    bus: Bus, size: int, is_scored: bool, caplog: pytest.LogCaptureFixture
) -> None:
    score = wire.RewardScore(reward="length", value=1.0)

    async def answer(request: wire.Message) -> wire.EpisodeScoreReply:
        assert isinstance(request, wire.EpisodeScoreRequest)
        assert len(request.response) == size
        return wire.EpisodeScoreReply(rewards="digest", scores=[score])

    answering = await answer_requests(bus, SCORES, "default", answer, shared=True)
    section = DomainSection(env="qa", rewards=[RewardConfig(name="my.py:length")])
    early = EarlyScores(bus, assignment(TICKET), section, 0.1, lambda *_: None)
    last = replace(trajectory(1, 0.0), response="a" * size)
    early.begin(EpisodeResult([last], "question", "answer", 1.0, 0.1, []))
    await until(lambda: not early.pending)  # it does not try again
    found = await early.take([last.episode], asyncio.Event())
    await answering.close()
    assert found == [wire.EpisodeScores(episode=3, rewards="digest", scores=[score])] * is_scored
    assert ("ticket 7, episode 3: not scored early" in caplog.text) is not is_scored


async def test_a_partial_reply_counts_but_ends_the_visit(bus: Bus) -> None:
    score = wire.RewardScore(reward="length", value=1.0)
    asked: list[wire.Message] = []
    judged: list[tuple[int, bool]] = []

    async def answer(request: wire.Message) -> wire.EpisodeScoreReply:
        asked.append(request)
        return wire.EpisodeScoreReply(rewards="digest", scores=[score], success=True, partial=True)

    answering = [
        await answer_requests(bus, SCORES, pool, answer, shared=True)
        for pool in ("first", "second")
    ]
    rewards = [RewardConfig(name="my.py:length", pool=pool) for pool in ("first", "second")]
    section = DomainSection(env="qa", rewards=rewards)
    early = EarlyScores(bus, assignment(TICKET), section, 0.1, lambda *one: judged.append(one))
    last = replace(trajectory(1, 0.0), reward_parts={})
    early.begin(EpisodeResult([last], "question", "answer", 1.0, 0.1, []))
    await until(lambda: not early.pending)
    found = await early.take([last.episode], asyncio.Event())
    for one in answering:
        await one.close()
    assert found == [wire.EpisodeScores(episode=3, rewards="digest", scores=[score])]
    assert len(asked) == 1
    assert judged == []  # the failed reward may be the one that decides
