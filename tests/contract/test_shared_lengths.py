"""What hubs learn about lengths outlives them, is shared between them, and costs nothing when the
broker has none.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from array import array
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from envhub_world import LAKE, World
from waits import until

from broker.contract import codec, wire
from broker.contract.streams import LENGTHS, MEMBERS
from broker.jetstream import publish
from broker.jetstream.bus import Bus
from broker.jetstream.kv import KeyValue
from broker.jetstream.provision import delete_stream
from broker.jetstream.publish import store_message
from envhub.lengths.base import UpcomingTurn
from envhub.lengths.corrections import LengthCalibration
from envhub.lengths.predictor import LengthPredictor
from envhub.lengths.selection import load_estimator
from envhub.lengths.shared import LengthStore


@pytest.fixture
async def world(bus: Bus, broker_url: str, tmp_path: Path) -> AsyncIterator[World]:
    made = World(bus, broker_url, tmp_path)
    yield made
    await made.close()


class Hub:
    """A hub's predictor of the domain ``lake`` and its exchange with the broker."""

    def __init__(self, bus: Bus, estimator: str = "history") -> None:
        self.predictor = LengthPredictor(
            "lake", load_estimator("lake", estimator, {})(), LengthCalibration()
        )
        self.store = LengthStore(bus, lambda: {"lake": (estimator, self.predictor)})

    def play(self, task: int, *lengths: int) -> None:
        for length in lengths:
            self.predictor.add(self.predictor.predict(upcoming(task)), length)

    def expects(self, task: int) -> int:
        return self.predictor.predict(upcoming(task)).expected


def upcoming(task: int) -> UpcomingTurn:
    return UpcomingTurn(array("i", [task]), 4096, task)


async def stored(bus: Bus) -> wire.LengthRecord:
    found = await bus.key_value(LENGTHS).get(f"{bus.run}.lake")
    assert found is not None
    assert isinstance(found[0], wire.LengthRecord)
    return found[0]


async def test_a_hub_that_starts_again_knows_what_its_predecessor_learnt(world: World) -> None:
    await world.publish_spec({"lake": LAKE})
    server = await world.server(script=lambda *_: "R")
    first = world.spawn("--id", "hub1")
    for _ in range(4):
        await world.ticket()
    await world.groups(4)
    first.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(first.wait, 100) == 0
    turns = len(server.asked)
    record = await stored(world.bus)
    assert (record.estimator, record.turns, record.domain) == ("regression", turns, "lake")
    assert server.asked[0].expected_tokens == 0
    async with world.hub("--id", "hub2"):
        await until(lambda: _is_heard(world, "hub2"))
        # the exchange begins with the hub, and waits for nothing but the broker
        await asyncio.sleep(0.5)
        await world.ticket()
        await world.groups(5)
    # "R" and the end of the turn
    assert [one.expected_tokens for one in server.asked[turns : turns + 2]] == [2, 2]
    assert all(2 <= one.expected_high <= 4 for one in server.asked[turns:])
    assert (await stored(world.bus)).turns == len(server.asked)


async def test_what_old_tickets_play_after_new_settings_teaches_the_new_estimator(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    lake = {**LAKE, "max_turns": 1}
    await world.publish_spec({"lake": lake})
    asked, go = asyncio.Event(), asyncio.Event()

    async def answer() -> str:
        asked.set()
        await go.wait()
        return "R"

    await world.server(script=lambda *_: answer())
    await world.ticket()
    caplog.set_level(logging.INFO)
    async with world.hub("--n", "1"):
        await until(asked.is_set)
        await world.publish_spec({"lake": {**lake, "length_estimator": "mean"}})
        await until(lambda: "domain lake has new settings" in caplog.text)
        go.set()
        await world.groups(1)
    record = await stored(world.bus)
    # the second episode's, which began after the new settings
    assert (record.estimator, record.turns) == ("mean", 1)


async def _is_heard(world: World, hub: str) -> bool:
    return f"{world.bus.run}.envhub.{hub}" in await world.bus.key_value(MEMBERS).values(
        world.bus.run
    )


async def test_two_hubs_learn_from_each_other(bus: Bus) -> None:
    one, other = Hub(bus), Hub(bus)
    for _ in range(25):
        one.play(1, 100)
        one.play(2, 400)
        other.play(3, 100)
        other.play(4, 400)
    for hub in (one, other, one):
        await hub.store.exchange()
    assert (await stored(bus)).turns == 100
    assert one.predictor.new == other.predictor.new == 0
    for hub in (one, other):
        expected = [hub.expects(task) for task in (1, 2, 3, 4)]
        assert expected == pytest.approx([100, 400, 100, 400], rel=0.2)
    late = Hub(bus)
    await late.store.exchange()
    assert late.expects(9) == pytest.approx(200, rel=0.2)  # between both
    assert late.predictor.new == 0
    assert (await stored(bus)).turns == 100


async def test_one_hub_alone_writes_what_it_knows_and_learns_nothing_twice(
    bus: Bus, caplog: pytest.LogCaptureFixture
) -> None:
    hub = Hub(bus, "mean")
    for length in (100, 100, 300, 300):
        hub.play(1, length)
        await hub.store.exchange()
    await hub.store.exchange()  # nothing is new on either side
    assert not caplog.records
    alone = Hub(bus, "mean")
    alone.play(1, 100, 100, 300, 300)
    assert hub.predictor.estimator.predict(upcoming(1)) == pytest.approx(
        alone.predictor.estimator.predict(upcoming(1))
    )
    assert (await stored(bus)).turns == 4


async def test_the_hub_that_writes_second_tries_again(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, fast = Hub(bus), Hub(bus)
    slow.play(1, *[100] * 10)
    fast.play(1, *[100] * 20)
    read = KeyValue.get_bytes

    async def read_and_be_overtaken(self: KeyValue, key: str) -> tuple[bytes, int] | None:
        found = await read(self, key)
        monkeypatch.setattr(KeyValue, "get_bytes", read)
        await fast.store.exchange()
        return found

    monkeypatch.setattr(KeyValue, "get_bytes", read_and_be_overtaken)
    await slow.store.exchange()
    assert ((await stored(bus)).turns, slow.predictor.new) == (20, 10)
    await slow.store.exchange()
    assert ((await stored(bus)).turns, slow.predictor.new) == (30, 0)


@pytest.mark.parametrize(
    "record",
    [
        b"\xc1",
        b"x" * (1 << 16) + b"x",
        wire.LengthRecord(
            domain="lake",
            estimator="mean",
            turns=9,
            values=wire.column([], "<f4"),
            tasks=wire.column([], "<i4"),
            counts=wire.column([], "<f4"),
            means=wire.column([], "<f4"),
        ),
    ],
)
async def test_a_record_that_does_not_fit_is_replaced(bus: Bus, record: Any) -> None:
    data = record if isinstance(record, bytes) else codec.encode(record)
    subject = f"{LENGTHS.key_prefix(bus.run)}{bus.run}.lake"
    await store_message(bus.link, LENGTHS.stream_name(bus.run), subject, data, {})
    hub = Hub(bus)
    hub.play(1, 50, 50)
    await hub.store.exchange()
    assert (await stored(bus)).estimator == "history"
    assert hub.expects(1) == pytest.approx(50, abs=1)


async def test_without_the_bucket_a_hub_goes_on_and_says_so_once(
    bus: Bus, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publish, "NO_STREAM_AFTER_S", 0.2)
    await delete_stream(bus.link, LENGTHS.stream_name(bus.run))
    hub = Hub(bus)
    hub.play(1, 50, 50)
    with caplog.at_level(logging.WARNING):
        await hub.store.exchange()
        await hub.store.exchange()
    assert [record.message.split(":")[0] for record in caplog.records] == ["lengths of lake"]
    assert hub.predictor.new == 2
    await bus.key_value(LENGTHS).ensure()
    await hub.store.exchange()
    assert ((await stored(bus)).turns, hub.predictor.new) == (2, 0)


async def test_a_record_is_bounded(bus: Bus) -> None:
    hub = Hub(bus, "regression")
    for task in range(1, 9001):
        hub.play(task, 50)
    await hub.store.exchange()
    record = await stored(bus)
    assert len(record.tasks.data) == 4 * 4096
    assert len(codec.encode(record)) <= 1 << 16
