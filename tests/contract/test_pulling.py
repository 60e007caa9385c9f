"""Long pulls that end early: at once, and without a message that nobody works on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
from waits import LONG_S, until

from broker.contract import wire
from broker.contract.streams import TICKETS
from broker.jetstream.bus import Bus
from broker.jetstream.pulling import fetch_unless


@pytest.fixture
async def other(broker_url: str, bus: Bus) -> AsyncIterator[Bus]:
    """A second process of the same run."""
    connected = await Bus.connect(broker_url, bus.run, name="other", deadline_s=60)
    yield connected
    await connected.close()


def ticket(number: int) -> wire.Ticket:
    return wire.Ticket(
        number=number,
        domain="lake",
        task_index=0,
        seed=1,
        min_version=0,
        max_staleness=1,
        group_size=2,
        min_group_size=2,
        deadline_s=9.0,
    )


async def test_a_message_ends_it(bus: Bus) -> None:
    queue, reason = await bus.work_queue(TICKETS, "lake"), asyncio.Event()
    pull = asyncio.create_task(fetch_unless(queue, 4, reason.wait()))
    await asyncio.sleep(0.2)
    await bus.publish(TICKETS, ticket(1), key="lake")
    async with asyncio.timeout(LONG_S):
        (delivery,) = await pull
    await delivery.ack()


async def test_a_reason_ends_it_at_once_and_leaves_the_queue_to_others(
    bus: Bus, other: Bus
) -> None:
    queue, theirs = await bus.work_queue(TICKETS, "lake"), await other.work_queue(TICKETS, "lake")
    reason = asyncio.Event()
    pull = asyncio.create_task(fetch_unless(queue, 4, reason.wait()))
    await asyncio.sleep(0.2)
    started = time.monotonic()
    reason.set()
    assert await pull == []
    assert time.monotonic() - started < LONG_S / 4  # and not after the 30 s of the pull
    await bus.publish(TICKETS, ticket(1), key="lake")
    (delivery,) = await theirs.fetch(1, LONG_S)
    await delivery.ack()


async def test_what_had_come_when_it_is_cancelled_goes_to_others(bus: Bus, other: Bus) -> None:
    """Marks would hold it for as long as this process lives, and nobody here would work on it."""
    queue, theirs = await bus.work_queue(TICKETS, "lake"), await other.work_queue(TICKETS, "lake")
    pulled: list[int] = []
    fetch = queue.fetch

    async def fetch_and_tell(limit: int, timeout_s: float) -> object:
        found = await fetch(limit, timeout_s)
        pulled.append(len(found))
        pulling.cancel()  # in the same turn of the loop in which the message is there
        return found

    queue.fetch = fetch_and_tell  # type: ignore[method-assign, assignment]
    pulling = asyncio.create_task(fetch_unless(queue, 4, asyncio.Event().wait()))
    await bus.publish(TICKETS, ticket(1), key="lake")
    await until(lambda: bool(pulled))
    await asyncio.gather(pulling, return_exceptions=True)
    assert pulling.cancelled()
    (delivery,) = await theirs.fetch(1, LONG_S)
    assert delivery.num_delivered == 2
    await delivery.ack()
