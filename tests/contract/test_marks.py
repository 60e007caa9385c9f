"""In-progress marks against a real server: one for each message held, and few."""

from __future__ import annotations

import asyncio

import pytest
from waits import LONG_S

from broker.contract import wire
from broker.contract.examples import EXAMPLES
from broker.contract.streams import (
    ACK_WAIT_S,
    LONGEST_ACK_WAIT_S,
    MARKS_PER_S,
    TICKETS,
    ack_wait_s,
    marking_period_s,
)
from broker.jetstream.ack_progress import IN_PROGRESS
from broker.jetstream.api import call_api
from broker.jetstream.bus import Bus
from broker.nats.client import Msg
from broker.settings.runspec import publish_runspec

IN_HAND = 1000
WINDOW_S = 5.0


def freeze_marks(bus: Bus, *, frozen: bool) -> None:
    """Let the thread of the marks see an event loop that stands still, as that of a suspended
    process.
    """
    bus._marks._hang_after_s = lambda: -1.0 if frozen else 30.0


async def ack_wait_of(bus: Bus, key: str = "lake") -> float:
    info = await call_api(bus.link, f"CONSUMER.INFO.{TICKETS.stream_name(bus.run)}.{key}")
    return float(info["config"]["ack_wait"]) / 1e9


async def test_redelivery_to_same_hub_leaves_no_mark(bus: Bus, broker_url: str) -> None:
    await bus.publish(TICKETS, EXAMPLES[wire.Ticket], key="lake", ticket=1)
    queue = await bus.work_queue(TICKETS, "lake")
    (lapsed,) = await queue.fetch(1, LONG_S)
    freeze_marks(bus, frozen=True)
    (newest,) = await queue.fetch(1, LONG_S)
    freeze_marks(bus, frozen=False)
    assert (lapsed.seq, lapsed.num_delivered, newest.seq, newest.num_delivered) == (1, 1, 1, 2)
    await newest.nak()
    assert bus._marks.num_held == 0
    second, third = [
        await Bus.connect(broker_url, bus.run, name=name, deadline_s=LONG_S) for name in ("b", "c")
    ]
    assert [
        one.num_delivered
        for one in await (await second.work_queue(TICKETS, "lake")).fetch(1, LONG_S)
    ] == [3]
    await second.close()  # as if it were killed: nothing is handed back
    (last,) = await (await third.work_queue(TICKETS, "lake")).fetch(1, LONG_S)
    assert last.num_delivered == 4
    await last.ack()
    await third.close()


async def test_settling_an_old_delivery_keeps_the_newest_marked(bus: Bus) -> None:
    await bus.publish(TICKETS, EXAMPLES[wire.Ticket], key="lake", ticket=1)
    queue = await bus.work_queue(TICKETS, "lake")
    (lapsed,) = await queue.fetch(1, LONG_S)
    freeze_marks(bus, frozen=True)
    (newest,) = await queue.fetch(1, LONG_S)
    bus._marks.release(lapsed._subject)
    assert bus._marks.num_held == 1
    bus._marks.hold(lapsed._subject, ACK_WAIT_S)  # a copy that the network delayed
    bus._marks.release(newest._subject)
    assert bus._marks.num_held == 0


async def test_unfetched_redelivery_is_fetched_once(bus: Bus) -> None:
    await bus.publish(TICKETS, EXAMPLES[wire.Ticket], key="lake", ticket=1)
    queue = await bus.work_queue(TICKETS, "lake")
    (first,) = await queue.fetch(1, LONG_S)
    freeze_marks(bus, frozen=True)
    (second,) = await queue.fetch(1, LONG_S)
    await queue._on_message(Msg(None, reply=first._subject, data=first.data))  # type: ignore[arg-type]
    await queue._on_message(Msg(None, reply=second._subject, data=second.data))  # type: ignore[arg-type]
    assert [one.num_delivered for one in await queue.fetch(5, LONG_S)] == [2]


async def test_marks_of_many_tickets_are_few(bus: Bus) -> None:
    await bus.ensure_consumers(TICKETS, ["lake"], ack_wait_s(IN_HAND))
    ticket = EXAMPLES[wire.Ticket]
    await asyncio.gather(
        *(bus.publish(TICKETS, ticket, key="lake", ticket=n + 1) for n in range(IN_HAND))
    )
    queue, count, marks = await bus.work_queue(TICKETS, "lake"), 0, 0
    while count < IN_HAND:
        count += len(await queue.fetch(IN_HAND - count, LONG_S))

    async def count_mark(message: Msg) -> None:
        nonlocal marks
        marks += message.data == IN_PROGRESS

    listening = await bus.link.subscribe("$JS.ACK.>", count_mark)
    await asyncio.sleep(WINDOW_S)
    assert 0 < marks <= (MARKS_PER_S + 10.0) * WINDOW_S  # 2,500 with one every two seconds
    await listening.close()


@pytest.mark.parametrize(
    ("open_tickets", "wait_s"),
    [(0, ACK_WAIT_S), (180, ACK_WAIT_S), (900, 22.0), (10**6, LONGEST_ACK_WAIT_S)],
)
def test_ack_wait_follows_open_tickets(open_tickets: int, wait_s: float) -> None:
    assert ack_wait_s(open_tickets) == pytest.approx(wait_s)
    if wait_s < LONGEST_ACK_WAIT_S:
        assert open_tickets / marking_period_s(wait_s) <= MARKS_PER_S + 1e-9
    assert 2 * marking_period_s(wait_s) + 2.0 <= wait_s + 1e-9


async def test_hubs_follow_a_raised_ack_wait(bus: Bus) -> None:
    train = {"groups_per_step": 450, "max_staleness": 1, "steps": 9}
    lake = {"env": "frozenlake", "group_size": 2}
    queue = await bus.work_queue(TICKETS, "lake")
    assert queue._ack_wait_s == ACK_WAIT_S
    spec = wire.RunSpec(
        run=bus.run,
        wire_version=wire.WIRE_VERSION,
        epoch=1,
        config={"domains": {"lake": lake}, "train": train},
        model_path="m",
    )
    await publish_runspec(bus, spec)
    assert await ack_wait_of(bus) == 22.0
    await bus.renew_queues()
    assert queue._ack_wait_s == 22.0
    spec.config["train"]["groups_per_step"] = 1  # hubs that know the longer wait keep their tickets
    await publish_runspec(bus, spec, above=1)
    assert await ack_wait_of(bus) == 22.0
