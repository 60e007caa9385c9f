"""Deliveries whose marks stopped for longer than the broker waits: their holders leave them alone."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from waits import LONG_S, until

from broker.contract import wire
from broker.contract.streams import ACK_WAIT_S, DEAD, SAMPLES, TICKETS
from broker.jetstream import ack_progress
from broker.jetstream.bus import Bus, Delivery
from broker.jetstream.ticket_results import close_ticket
from broker.server.private_server import BrokerServer

FROZEN_S = ACK_WAIT_S + 2.0


@pytest.fixture
async def other(broker_url: str, bus: Bus) -> AsyncIterator[Bus]:
    connected = await Bus.connect(broker_url, bus.run, name="other", deadline_s=60)
    yield connected
    await connected.close()


def ticket(number: int) -> wire.Ticket:
    return wire.Ticket(
        number=number, domain="lake", task_index=0, seed=7, min_version=0, max_staleness=1, group_size=2,
        min_group_size=2, deadline_s=60.0,
    )  # fmt: skip


async def take(bus: Bus, within_s: float = LONG_S) -> Delivery:
    (delivery,) = await (await bus.work_queue(TICKETS, "lake")).fetch(1, within_s)
    return delivery


async def close(bus: Bus, delivery: Delivery) -> bool:
    closed = wire.Closed(
        ticket=delivery.seq, domain="lake", reason="deadline", detail="too late", by="hub"
    )
    return await close_ticket(bus, delivery, TICKETS, closed, evaluation=False)


def freeze(bus: Bus) -> None:
    """Let neither the event loop nor the thread of the marks run for longer than the broker waits."""
    marks = bus._marks
    with marks._lock:  # the thread comes no further than here
        time.sleep(FROZEN_S)


async def test_a_hub_that_wakes_up_does_not_close_what_another_plays(bus: Bus, other: Bus) -> None:
    await bus.publish(TICKETS, ticket(1), key="lake", ticket=1)
    mine = await take(bus)
    await until(lambda: mine.is_ours)
    taking = asyncio.create_task(take(other))
    await asyncio.to_thread(freeze, bus)
    assert mine.has_lapsed
    assert not await close(bus, mine)
    theirs = await taking
    assert (theirs.seq, theirs.num_delivered) == (1, 2)
    assert await bus.last_seq(SAMPLES) == await bus.last_seq(DEAD) == 0
    await asyncio.sleep(1.0)
    assert theirs.is_ours
    await mine.nak()  # would have the ticket delivered a third time
    assert not await (await bus.work_queue(TICKETS, "lake")).fetch(1, 1.0)
    assert await close(other, theirs)
    assert await bus.depth(TICKETS) == {}


async def test_lapsed_message_is_not_marked_again(bus: Bus, other: Bus) -> None:
    await bus.publish(TICKETS, ticket(1), key="lake", ticket=1)
    mine = await take(bus)
    await asyncio.to_thread(freeze, bus)
    await until(lambda: mine.has_lapsed)
    assert (await take(other)).num_delivered == 2
    await other.close()  # dies
    assert (await take(bus)).num_delivered == 3, "the marks of the first delivery kept it"


async def test_confirmation_must_be_newer_than_the_wait(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker no longer answers marks: the hub may go on, and must not close."""
    await bus.publish(TICKETS, ticket(1), key="lake", ticket=1)
    mine = await take(bus)

    async def unanswered(marks: object, *_: object) -> None:
        return None

    monkeypatch.setattr(ack_progress.AckProgress, "_ask", unanswered)
    await until(lambda: not mine.is_ours)
    assert not mine.has_lapsed
    assert not await close(bus, mine)
    assert await bus.last_seq(SAMPLES) == 0


async def test_work_goes_on_after_a_restart_of_the_only_broker(tmp_path: Path) -> None:
    """It was down for longer than it waits for marks: it served nobody else, but may deliver the
    ticket again.
    """
    server = BrokerServer(str(tmp_path))
    server.start()
    port = int(server.url.rpartition(":")[2])
    bus = await Bus.connect(server.url, "demo", name="x", deadline_s=60)
    await bus.ensure_streams()
    await bus.publish(TICKETS, ticket(1), key="lake", ticket=1)
    mine = await take(bus)
    await until(lambda: bus._marks._confirmed_at > 0)
    os.kill(server.pid, signal.SIGKILL)
    server.stop()
    await asyncio.sleep(FROZEN_S)
    server = BrokerServer(str(tmp_path), port=port)
    server.start()
    confirmed_at = bus._marks._confirmed_at
    await until(lambda: bus._marks._confirmed_at > confirmed_at)
    assert not mine.has_lapsed
    assert not mine.is_ours
    assert not await close(bus, mine)
    assert await bus.last_seq(SAMPLES) == 0
    assert (await take(bus)).num_delivered == 2
    await bus.close()
    server.stop()


# nats-py leaves the sockets of its attempts to reach a frozen broker to the garbage collector
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_frozen_broker_that_goes_on_may_have_served_others(tmp_path: Path) -> None:
    """The connection breaks and comes back to the same server, as behind a partition."""
    with BrokerServer(str(tmp_path)) as server:
        bus = await Bus.connect(server.url, "demo", name="x", deadline_s=60)
        await bus.ensure_streams()
        await bus.publish(TICKETS, ticket(1), key="lake", ticket=1)
        mine = await take(bus)
        os.kill(server.pid, signal.SIGSTOP)
        try:
            await until(lambda: not bus.link.connected.is_set())
            closing = asyncio.create_task(close(bus, mine))
            await asyncio.sleep(FROZEN_S)
        finally:
            os.kill(server.pid, signal.SIGCONT)
        assert not await closing
        await until(lambda: mine.has_lapsed or not bus._marks.num_held)
        assert (await take(bus)).num_delivered > 1
        assert await bus.last_seq(SAMPLES) == 0
        await bus.close()
