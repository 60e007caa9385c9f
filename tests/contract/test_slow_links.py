"""Large messages over links of few megabytes per second: each crosses the link once."""

from __future__ import annotations

import asyncio
import time

import pytest
from large_groups import MB, group
from slow_link import slow_link

from broker.contract import wire
from broker.contract.streams import EPISODES, SAMPLES, TICKETS
from broker.jetstream.bus import Bus
from broker.jetstream.delivery import Delivery


async def drained(bus: Bus, key: str, count: int, limit: int = 64) -> list[Delivery]:
    """Fetch and acknowledge until ``count`` different messages have come."""
    queue = await bus.work_queue(EPISODES, key)
    found: list[Delivery] = []
    acks = []
    while len({one.seq for one in found}) < count:
        for delivery in await queue.fetch(limit, 1.0):
            found.append(delivery)
            acks.append(asyncio.create_task(delivery.ack()))
    await asyncio.gather(*acks)
    return found


@pytest.mark.timeout(240)
async def test_groups_cross_a_slow_link_once(bus: Bus, broker_url: str) -> None:
    """24 groups of 2 MB over 6 MB/s: 8 s at best."""
    count, size = 24, 2 * MB
    for ticket in range(1, count + 1):
        await bus.publish(EPISODES, group(ticket, size), key="p", ticket=ticket)
    async with slow_link(broker_url, down=6 * MB) as link:
        far = await Bus.connect(link.url, bus.run, name="far", deadline_s=60)
        began = time.monotonic()
        found = await drained(far, "p", count)
        took_s = time.monotonic() - began
        await far.close()
        assert [one.num_delivered for one in found] == [1] * count
        assert link.down < count * size * 1.1
    assert took_s < 30.0


@pytest.mark.timeout(240)
async def test_sixteen_groups_of_8_mb_neither_disconnect_nor_come_twice(
    bus: Bus, broker_url: str
) -> None:
    count, size = 16, 8 * MB
    for ticket in range(1, count + 1):
        await bus.publish(EPISODES, group(ticket, size), key="p", ticket=ticket)
    async with slow_link(broker_url, down=12 * MB) as link:
        far = await Bus.connect(link.url, bus.run, name="far", deadline_s=60)
        lost: list[int] = []
        far.link.on_disconnect.add(lambda: lost.append(1))
        found = await drained(far, "p", count)
        await far.close()
        assert lost == [1]  # by close() alone
        assert [one.num_delivered for one in found] == [1] * count
        assert link.down < count * size * 1.1


@pytest.mark.timeout(240)
async def test_a_large_publish_over_a_slow_link_is_sent_once(bus: Bus, broker_url: str) -> None:
    """8 MB over 1 MB/s take 8 s, longer than any confirmation and than the connection's own pings
    may take.
    """
    size = 8 * MB
    async with slow_link(broker_url, up=MB) as link:
        far = await Bus.connect(link.url, bus.run, name="far", deadline_s=60)
        assert (
            await far.publish(SAMPLES, group(1, size, pools=[]), ticket=1, message_id="tickets-1")
            == 1
        )
        assert link.up < size * 1.1
        assert link.connections == 1
        await far.close()
    assert await bus.depth(SAMPLES) == {"": 1}


async def test_a_small_call_behind_a_large_publish_is_not_repeated(
    bus: Bus, broker_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It waits in the same line; only what has left may be missed."""
    async with slow_link(broker_url, up=MB) as link:
        far = await Bus.connect(link.url, bus.run, name="far", deadline_s=60)
        large = asyncio.create_task(far.publish(SAMPLES, group(1, 6 * MB, pools=[]), ticket=1))
        await asyncio.sleep(0.1)
        assert await far.last_seq(TICKETS) == 0
        await large
        assert link.up < 6.6 * MB
        await far.close()
    assert not [record for record in caplog.records if "again" in record.getMessage()]


async def test_a_large_record_is_read_over_a_slow_link(
    bus: Bus, broker_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A reader that is receiving the bytes of a message is not without a sign of life."""
    await bus.publish(SAMPLES, group(1, 8 * MB, pools=[]), ticket=1)
    async with slow_link(broker_url, down=MB) as link:
        far = await Bus.connect(link.url, bus.run, name="far", deadline_s=60)
        async with asyncio.timeout(60):
            record = await anext(far.read_log(SAMPLES, 1))
        assert isinstance(record.message, wire.Group)
        assert link.down < 9 * MB
        await far.close()
    assert not [record for record in caplog.records if "again" in record.getMessage()]


async def test_a_connection_whose_bytes_move_is_kept(
    bus: Bus, broker_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answers to its pings come behind all that is on the wire; the third one that is late ends
    a connection.
    """
    monkeypatch.setattr("broker.nats.connection.PING_EVERY_S", 1)
    monkeypatch.setattr("broker.nats.connection.LOOK_EVERY_S", 0.4)
    async with slow_link(broker_url, up=0.3 * MB) as link:
        far = await Bus.connect(link.url, bus.run, name="far", deadline_s=60)
        await far.publish(SAMPLES, group(1, int(1.9 * MB), pools=[]), ticket=1)
        assert link.connections == 1
        await far.close()
