"""Publishes tickets in order under their own numbers, and closes those that no record ends in time."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Final

from broker.contract import wire
from broker.contract.streams import SAMPLES, TICKETS, Stream
from broker.errors import LostState
from broker.jetstream.bus import Bus
from broker.runtime.presence import Roster
from broker.telemetry.traces import TicketTraces
from learner.credit.ledger import Ledger

log = logging.getLogger(__name__)

TICK_S: Final = 1.0
PIPELINED: Final = 256  # tickets published before their confirmations are awaited
REBASE: Final = "it lost its store; `rlearner start … --rebase` continues with the open tickets counted dead"

AnyTicket = wire.Ticket | wire.EvalTicket


class TicketIssuer:
    """Publisher of the tickets of one stream in order; a ticket's number is its sequence there.

    Many are in flight at once. Each names the sequence that must precede it, so the broker refuses tickets out of
    order, and refused ones are published again.

    Args:
        stream: TICKETS or EVALTICKETS.
        admit: awaited with the number of each ticket before it is published, for example until the broker has room.
        traces: gets the grant of each ticket.
    """

    def __init__(
        self,
        bus: Bus,
        stream: Stream,
        admit: Callable[[int], Awaitable[None]] | None = None,
        traces: TicketTraces | None = None,
    ) -> None:
        self._bus, self._stream, self._admit, self._traces = bus, stream, admit, traces
        self._waiting: asyncio.Queue[AnyTicket | int] = asyncio.Queue()  # tickets to publish, numbers to withdraw
        self._last = 0  # newest sequence known to be stored

    def put(self, ticket: AnyTicket) -> None:
        """Queue a ticket for publishing."""
        if self._traces is not None:
            self._traces.granted(ticket.number, time.time())
        self._waiting.put_nowait(ticket)

    def withdraw(self, number: int) -> None:
        """Delete a ticket from its stream, so that no hub runs it; a hub that already holds it completes it."""
        self._waiting.put_nowait(number)

    async def serve(self) -> None:
        """Publish until cancelled.

        Raises:
            LostState: if the broker remembers fewer tickets than were issued.
        """
        self._last = await self._bus.last_seq(self._stream)
        while True:
            batch = [await self._waiting.get()]
            while len(batch) < PIPELINED and not self._waiting.empty():
                batch.append(self._waiting.get_nowait())
            await self._publish([one for one in batch if not isinstance(one, int)])
            await asyncio.gather(*(self._bus.delete(self._stream, one) for one in batch if isinstance(one, int)))

    async def _publish(self, batch: list[AnyTicket]) -> None:
        """Publish tickets with consecutive numbers; skip those that an earlier incarnation published."""
        missing = [ticket for ticket in batch if ticket.number > self._last]
        while missing:
            storing = []
            for ticket in missing:
                if self._admit is not None:
                    await self._admit(ticket.number)
                storing.append(asyncio.create_task(self._store(ticket)))
            stored = await asyncio.gather(*storing)
            confirmed = max((seq for seq in stored if seq is not None), default=0)
            self._last = confirmed if None not in stored else await self._bus.last_seq(self._stream)
            missing = [ticket for ticket in missing if ticket.number > self._last]
            if missing and missing[0].number != self._last + 1:
                end = f"the broker's {self._stream.name} end at number {self._last}"
                raise LostState(f"{end}, but {missing[0].number - 1} were issued; {REBASE}")

    async def _store(self, ticket: AnyTicket) -> int | None:
        key, number, began = ticket.domain, ticket.number, time.time()
        stored = await self._bus.publish(self._stream, ticket, key=key, ticket=number, expected_last_seq=number - 1)
        if self._traces is not None:
            self._traces.add("grant", number, began, time.time())
        return stored


class TicketAges:
    """Ages of the open tickets. Pure.

    A ticket ages from its first delivery to a hub on, while a hub that serves its domain is alive and the run is not
    paused. So neither long steps, nor a pause, nor missing hubs make a ticket expire.

    Args:
        timeout_s: the age at which a ticket expires.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._age_s: dict[int, float] = {}

    def passed(
        self,
        elapsed_s: float,
        waiting: Mapping[int, str],
        delivered: Mapping[str, int],
        served: Collection[str],
        *,
        paused: bool = False,
    ) -> list[int]:
        """Return the tickets that expired in the last ``elapsed_s`` seconds, each once.

        Args:
            waiting: number -> domain of the tickets without a record.
            delivered: domain -> highest number ever delivered. A domain's tickets are delivered in numerical order.
            served: domains with at least one hub.
            paused: whether the operator has paused the run.
        """
        self._age_s = {number: age for number, age in self._age_s.items() if number in waiting}
        if paused:
            return []
        expired = []
        for number, domain in waiting.items():
            if domain not in served or number > delivered.get(domain, 0):
                continue
            before = self._age_s.get(number, 0.0)
            self._age_s[number] = before + elapsed_s
            if before < self._timeout_s <= before + elapsed_s:
                expired.append(number)
        return sorted(expired)


class TicketReaper:
    """Service that closes tickets that no hub ends, by a record in the log.

    Args:
        paused: returns whether the operator has paused the run.
        every_s: seconds between two checks.
    """

    def __init__(
        self,
        bus: Bus,
        ledger: Ledger,
        roster: Roster,
        timeout_s: float,
        paused: Callable[[], bool] = lambda: False,
        *,
        every_s: float = TICK_S,
    ) -> None:
        self._bus, self._ledger, self._roster, self._timeout_s, self._paused = bus, ledger, roster, timeout_s, paused
        self._ages, self._every_s = TicketAges(timeout_s), every_s

    async def serve(self) -> None:
        """Check every ``every_s`` seconds until cancelled."""
        loop = asyncio.get_running_loop()
        looked_at = loop.time()
        while True:
            await asyncio.sleep(self._every_s)
            waiting = {number: self._ledger.ticket(number).domain for number in self._ledger.waiting_for}
            delivered = {name: await self._bus.last_delivered(TICKETS, name) for name in sorted(set(waiting.values()))}
            served = {domain for hub in self._roster.alive("envhub") for domain in hub.serves}
            # A disconnected broker or a stalled event loop must not count as time that a hub had.
            elapsed_s, looked_at = min(loop.time() - looked_at, 2 * self._every_s), loop.time()
            for number in self._ages.passed(elapsed_s, waiting, delivered, served, paused=self._paused()):
                detail = f"no record within train.ticket_timeout_s = {self._timeout_s:g} s of its first delivery"
                await close_by_timeout(self._bus, self._ledger, number, "timeout", detail)


async def close_by_timeout(bus: Bus, ledger: Ledger, number: int, cause: str, detail: str) -> None:
    """Close a ticket by a record in the log, unless one arrived while another ticket was being closed."""
    if number in ledger.waiting_for:
        domain = ledger.ticket(number).domain
        log.warning("ticket %d (%s) closed: %s", number, domain, detail)
        closed = wire.Closed(ticket=number, domain=domain, reason="timeout", detail=detail, by=bus.name)
        key = f"{cause}.{bus.run}.{number}"
        # if the store is full, room comes with a step, which may need the ticket's replacement
        await bus.publish(SAMPLES, closed, ticket=number, message_id=key, is_essential=True)
