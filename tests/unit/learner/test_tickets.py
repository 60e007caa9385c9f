"""Tickets on their way to the broker, and those that no hub ends: in virtual time, against a broker
in memory.
"""

from __future__ import annotations

import asyncio
import random
import socket
from typing import Any

import pytest
from waits import until

from bench.scale.virtual import MemoryBus, run
from broker.contract import wire
from broker.contract.streams import SAMPLES, TICKETS, Stream
from broker.errors import LostState
from learner.credit.ledger import IssueTicket, Ledger, TicketEnd
from learner.credit.ticket_rules import DomainRule, TicketRules
from learner.credit.tickets import TicketIssuer, TicketReaper

RTT_S = 0.05


class SlowBus(MemoryBus):
    """Answers each publication after a round trip; where it shuffles, messages arrive in an order
    of chance.
    """

    def __init__(self, *, shuffles: bool = False) -> None:
        super().__init__("run", "learner")
        self._random = random.Random(0) if shuffles else None

    async def publish(self, stream: Stream, message: wire.Message, **more: Any) -> int | None:
        if self._random is not None:
            await asyncio.sleep(self._random.uniform(0, RTT_S))
        stored = await super().publish(stream, message, **more)
        await asyncio.sleep(RTT_S)
        return stored


def tickets(groups: int) -> tuple[Ledger, list[wire.Ticket]]:
    ledger = Ledger(TicketRules(9, groups, 0, "wait", 0, (DomainRule("lake", 1.0, 2, 2, 9.0),)))
    return ledger, [
        action.ticket for action in ledger.open_credit() if isinstance(action, IssueTicket)
    ]


async def _published(bus: SlowBus, issued: list[wire.Ticket]) -> float:
    """Seconds until all of them are in the stream."""
    issuer: Any = TicketIssuer(bus, TICKETS)  # type: ignore[arg-type]
    for ticket in issued:
        issuer.put(ticket)
    serving = asyncio.create_task(issuer.serve())
    began = asyncio.get_running_loop().time()
    await asyncio.wait(
        {serving, asyncio.ensure_future(until(lambda: _holds(bus, TICKETS, len(issued))))},
        return_when="FIRST_COMPLETED",
    )
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
    if not serving.cancelled():
        serving.result()
    return asyncio.get_running_loop().time() - began


def test_many_tickets_share_a_round_trip() -> None:
    _, issued = tickets(1_000)
    bus = SlowBus()
    assert run(_published(bus, issued)) < 5 * RTT_S  # one after the other: 1,000 of them
    taken = [bus.take(TICKETS, "lake") for _ in issued]
    assert taken == issued


def test_what_came_out_of_order_is_published_again() -> None:
    _, issued = tickets(40)
    bus = SlowBus(shuffles=True)
    run(_published(bus, issued))
    assert [bus.take(TICKETS, "lake") for _ in issued] == issued
    assert bus.take(TICKETS, "lake") is None


def test_a_stream_that_has_lost_tickets_is_noticed() -> None:
    _, issued = tickets(40)
    with pytest.raises(LostState, match="end at number 0, but 9 were issued"):
        run(_published(SlowBus(), issued[9:]))


async def _holds(bus: MemoryBus, stream: Stream, last: int) -> bool:
    return await bus.last_seq(stream) >= last


class Roster:
    def alive(self, role: str) -> list[wire.Presence]:
        if role != "envhub":
            return []
        host, tickets = socket.gethostname(), [1, 2]
        return [
            wire.Presence(
                role=role,
                id="h",
                host=host,
                pid=1,
                state="serving",
                serves=["lake"],
                tickets=tickets,
            )
        ]


def test_a_ticket_that_ends_while_another_is_being_closed() -> None:
    """Both expire at once. The second ends while the closing of the first is confirmed: it is left
    alone, and the reaper goes on.
    """

    async def scene() -> list[int]:
        ledger, issued = tickets(2)
        bus = SlowBus()
        await _published(bus, issued)
        assert bus.take(TICKETS, "lake") is not None
        assert bus.take(TICKETS, "lake") is not None
        reaper = TicketReaper(bus, ledger, Roster(), timeout_s=3.0)  # type: ignore[arg-type]
        reaping = asyncio.create_task(reaper.serve())
        await until(lambda: _holds(bus, SAMPLES, 1))
        ledger.apply(TicketEnd(2, "env_error"), 5)
        await asyncio.sleep(1.5)
        assert not reaping.done()
        reaping.cancel()
        closed = [entry.ticket async for entry in _so_far(bus)]
        return closed

    assert run(scene()) == [1]


class Hubs:
    """Members that can be changed: (role, what it serves, its tickets or None)."""

    def __init__(self, *hubs: tuple[str, str, list[int] | None]) -> None:
        self.hubs = list(hubs)

    def alive(self, role: str) -> list[wire.Presence]:
        host = socket.gethostname()
        return [
            wire.Presence(
                role=one, id=one, host=host, pid=1, state="serving", serves=[name], tickets=tickets
            )
            for one, name, tickets in self.hubs
            if one == role
        ]


def closed_within(
    hubs: Hubs, seconds: float, *, pools: dict[str, list[str]] | None = None, taken: int = 2
) -> list[int]:
    """The tickets of two that a reaper closes in virtual time."""

    async def scene() -> list[int]:
        ledger, issued = tickets(2)
        bus = SlowBus()
        await _published(bus, issued)
        for _ in range(taken):
            assert bus.take(TICKETS, "lake") is not None
        around: Any = bus
        roster: Any = hubs
        reaping = asyncio.create_task(
            TicketReaper(around, ledger, roster, 3.0, pools=pools or {}).serve()
        )
        await asyncio.sleep(seconds)
        reaping.cancel()
        return [entry.ticket async for entry in _so_far(bus)] if await bus.last_seq(SAMPLES) else []

    return run(scene())


def test_ticket_in_no_hub_is_not_closed() -> None:
    """Delivered and handed back, or played and in a reward queue: hubs are there, and none works on
    it.
    """
    assert closed_within(Hubs(("envhub", "lake", []), ("rewardhub", "judge", [])), 86_400.0) == []


def test_ticket_of_a_pool_without_a_hub_is_not_closed() -> None:
    hubs = Hubs(("envhub", "lake", [1]))
    assert closed_within(hubs, 86_400.0, pools={"lake": ["judge"]}) == []
    hubs.hubs.append(("rewardhub", "judge", [2]))
    assert closed_within(hubs, 60.0, pools={"lake": ["judge"]}) == [1, 2]


def test_hub_of_another_program_has_what_was_delivered() -> None:
    assert closed_within(Hubs(("envhub", "lake", None)), 60.0, taken=1) == [1]


async def _so_far(bus: MemoryBus) -> Any:
    last = await bus.last_seq(SAMPLES)
    async for entry in bus.read_log(SAMPLES, 1):
        yield entry
        if entry.seq >= last:
            return
