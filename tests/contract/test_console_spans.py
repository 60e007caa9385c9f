"""What real processes report for the timeline, and what the console's index keeps of it."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from pathlib import Path

import learner_fleet as fleet
import pytest
from envhub_world import LAKE, World
from waits import until

from broker.contract import wire
from broker.contract.streams import SAMPLES
from broker.jetstream.bus import Bus
from broker.jetstream.core_messages import watch_metrics
from broker.runtime.process import Stop
from broker.settings.run_settings import RunSettings
from learner.reporting.metrics import read_lines
from learner.service import serve_learner
from rlearner.console.index.follower import RunFollower
from rlearner.console.index.timeline import LEARNER


@pytest.fixture
async def world(bus: Bus, broker_url: str, tmp_path: Path) -> AsyncIterator[World]:
    made = World(bus, broker_url, tmp_path)
    yield made
    await made.close()


async def test_a_hub_reports_the_time_that_its_episodes_took(world: World) -> None:
    await world.publish_spec({"lake": LAKE})
    await world.server()
    spans: list[wire.Span] = []

    async def watch() -> None:
        async for metrics in watch_metrics(world.bus, "envhub"):
            spans.extend(metrics.spans)

    watching = asyncio.create_task(watch())
    async with world.hub("--n", "17", "--id", "hub1"):
        await until(lambda: any(one.kind == "wait" for one in spans))
        ticket = await world.ticket()
        (group,) = await world.records(1, SAMPLES)
        before = len(spans)
        await until(lambda: any(one.kind == "wait" for one in spans[before + 2 :]))
    watching.cancel()
    assert isinstance(group, wire.Group)
    episodes, turns = len(group.trajectories), sum(len(one.turns) for one in group.trajectories)
    sums: dict[str, float] = defaultdict(float)
    counts: dict[str, int] = defaultdict(int)
    for one in spans:
        if not one.sample:
            sums[one.kind] += one.seconds
            counts[one.kind] += one.count
    assert counts["generate"] == turns
    assert sums["generate"] == pytest.approx(episodes * group.generate_s, rel=0.2, abs=0.02)
    assert sums["env_step"] == pytest.approx(episodes * group.env_step_s, rel=0.2, abs=0.02)
    assert {one.ticket for one in spans if one.sample} == {ticket}


async def test_the_timeline_of_a_learner_is_that_of_its_metrics(
    bus: Bus, broker_url: str, run_name: str, tmp_path: Path
) -> None:
    config = fleet.config(str(tmp_path), run_name, train={"steps": 6}, samples={"keep": True})
    folder = tmp_path / run_name
    follower = RunFollower(folder)

    async def collect() -> None:
        async for metrics in watch_metrics(bus):
            follower.live.add(metrics)

    collecting = asyncio.create_task(collect())
    async with (
        fleet.Hub(bus, lambda ticket: [fleet.group(ticket, ticket.min_version)], work_s=0.4),
        asyncio.timeout(200),
    ):
        learner = asyncio.create_task(
            serve_learner(RunSettings.of_config(config), broker_url, Stop(), connect_deadline_s=60)
        )
        await until((folder / "config.yaml").exists)
        follower.start()
        await learner
    try:
        await until(lambda: follower.status().steps == 6 and follower.status().trajectories == 24)
        await until(lambda: not follower.live.is_due)
        queries, lines = follower.queries, read_lines(folder / "metrics.jsonl")
        found = queries.spans(*queries.extent())
        sums: dict[str, float] = defaultdict(float)
        for one in found.spans:
            if one.lane == LEARNER and not one.sample:
                sums[one.kind] += one.seconds
        whole = sum(line["time/step"] for line in lines)
        assert 0 < sums["train"] <= sum(line["time/train"] for line in lines) + 0.5
        assert sums["wait"] > 0.3 * whole
        assert found.live_since <= lines[0]["time"]
        assert {one.step for one in queries.search(limit=100).rows} == {1, 2, 3, 4, 5, 6}
        assert [one.kind for one in queries.events(kinds=("joined", "epoch"))].count("epoch") == 1
    finally:
        collecting.cancel()
        await asyncio.gather(collecting, return_exceptions=True)
        await asyncio.to_thread(follower.close)
