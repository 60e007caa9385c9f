"""A ticket with several records in parts: the first in the log counts for every reader, and its
parts stay.
"""

from __future__ import annotations

import asyncio

from large_groups import MB
from loop_kit import opened_ledger, running_loop, scored_group
from waits import until

from broker.contract.streams import PARTS, SAMPLES
from broker.jetstream.bus import Bus
from learner.credit.ledger import Ledger

SIZE = 3 * MB
COUNT = 3  # parts of that size


async def num_parts(bus: Bus) -> int:
    return (await bus.depth(PARTS))[""]


async def position_reached(ledger: Ledger, position: int, loop: asyncio.Task[bool]) -> None:
    await until(lambda: ledger.state.position >= position or loop.done())
    assert not loop.done(), loop.exception()


async def ledger_of_next_life(bus: Bus, position: int) -> Ledger:
    """The ledger of a learner that begins with the log's first record, as after a kill before any
    checkpoint.
    """
    ledger = opened_ledger()
    async with running_loop(bus, ledger) as loop:
        await position_reached(ledger, position, loop)
    return ledger


async def test_late_duplicate_keeps_the_parts_that_count(bus: Bus) -> None:
    """Its hub was frozen longer than the broker remembers message ids; then the learner is killed."""
    ledger = opened_ledger()
    sent = scored_group(ledger.ticket(1), SIZE)
    async with running_loop(bus, ledger) as loop:
        assert await bus.publish(SAMPLES, sent, ticket=1, message_id="tickets-1") == 1
        await position_reached(ledger, 1, loop)
        assert await bus.publish(SAMPLES, sent, ticket=1, message_id="tickets-1, later") == 2
        await position_reached(ledger, 2, loop)
    assert (ledger.counts()["open"], ledger.counts()["duplicate"]) == (4, 1)
    assert (await ledger_of_next_life(bus, 2)).dump() == ledger.dump()


async def test_second_upload_goes_once_the_first_is_accepted(bus: Bus) -> None:
    sent = scored_group(opened_ledger().ticket(1), SIZE)
    for name in ("first", "second"):
        await bus.publish(SAMPLES, sent, ticket=1, message_id=name)
    assert await num_parts(bus) == 2 * COUNT
    ledger = await ledger_of_next_life(bus, 2)
    assert (ledger.counts()["open"], ledger.counts()["duplicate"], ledger.counts()["dead"]) == (
        4,
        1,
        0,
    )
    assert await num_parts(bus) == COUNT
    assert (await ledger_of_next_life(bus, 2)).dump() == ledger.dump()


async def test_refused_record_deletes_no_parts(bus: Bus) -> None:
    """The ticket has ended otherwise: this reader does not know which of its records another one
    counts.
    """
    ledger = opened_ledger()
    sent = scored_group(ledger.ticket(1), SIZE)
    for name in ("first", "second"):
        await bus.publish(SAMPLES, sent, ticket=1, message_id=name)
    ledger.state.live.pop(1)
    async with running_loop(bus, ledger) as loop:
        await position_reached(ledger, 2, loop)
    assert ledger.counts()["duplicate"] == 2
    assert await num_parts(bus) == 2 * COUNT
