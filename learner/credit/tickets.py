"""Publishes tickets in order under their own numbers, and closes those that take a hub too long."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from broker.contract import wire
from broker.contract.streams import EVALTICKETS, SAMPLES, TICKETS, Stream
from broker.errors import LostState
from broker.jetstream.bus import Bus
from broker.runtime.presence import Roster
from broker.telemetry.traces import TicketTraces
from learner.credit.ledger import Ledger

log = logging.getLogger(__name__)

TICK_S: Final = 1.0
# Tickets that are published before their confirmations are awaited.
PIPELINED: Final = 256
REBASE: Final = (
    "it lost its store; `rlearner start … --rebase` continues with the open tickets counted dead"
)

AnyTicket = wire.Ticket | wire.EvalTicket


@dataclass(frozen=True)
class _Withdrawal:
    number: int
    is_queued: bool


class TicketIssuer:
    """Publisher of the tickets of one stream in order; a ticket's number is its sequence there.

    Many are in flight at once. Each names the sequence that must precede it, so the broker refuses
    tickets out of order, and refused ones are published again.

    Args:
        stream: TICKETS or EVALTICKETS.
        admit: awaited with each ticket's number before it is published, until there is room.
        traces: gets the grant of each ticket.
    """

    def __init__(
        self,
        bus: Bus,
        stream: Stream,
        admit: Callable[[int], Awaitable[None]] | None = None,
        traces: TicketTraces | None = None,
    ) -> None:
        self._bus = bus
        self._stream = stream
        self._admit = admit
        self._traces = traces
        self._waiting: asyncio.Queue[AnyTicket | _Withdrawal] = asyncio.Queue()
        self._last = 0  # newest sequence known to be stored

    def put(self, ticket: AnyTicket) -> None:
        """Queue a ticket for publishing."""
        if self._traces is not None:
            self._traces.granted(ticket.number, time.time())
        self._waiting.put_nowait(ticket)

    def withdraw(self, number: int, *, is_queued: bool = True) -> None:
        """Delete a closed ticket's groups from the reward queues; hubs that hold one complete it.

        Args:
            is_queued: whether the ticket may be in its stream, from which it is deleted then.
        """
        self._waiting.put_nowait(_Withdrawal(number, is_queued))

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
            await self._publish([entry for entry in batch if not isinstance(entry, _Withdrawal)])
            await asyncio.gather(
                *(self._remove(entry) for entry in batch if isinstance(entry, _Withdrawal))
            )

    async def _remove(self, withdrawal: _Withdrawal) -> None:
        if withdrawal.is_queued:
            await self._bus.delete(self._stream, withdrawal.number)
        await self._bus.remove_groups(withdrawal.number, evaluation=self._stream is EVALTICKETS)

    async def _publish(self, batch: list[AnyTicket]) -> None:
        """Publish consecutive tickets; skip those that an earlier incarnation published."""
        missing = [ticket for ticket in batch if ticket.number > self._last]
        while missing:
            tasks = []
            for ticket in missing:
                if self._admit is not None:
                    await self._admit(ticket.number)
                tasks.append(asyncio.create_task(self._store(ticket)))
            seqs = await asyncio.gather(*tasks)
            if None in seqs:
                self._last = await self._bus.last_seq(self._stream)
            else:
                self._last = max((seq for seq in seqs if seq is not None), default=0)
            missing = [ticket for ticket in missing if ticket.number > self._last]
            if missing and missing[0].number != self._last + 1:
                end = f"the broker's {self._stream.name} end at number {self._last}"
                raise LostState(f"{end}, but {missing[0].number - 1} were issued; {REBASE}")

    async def _store(self, ticket: AnyTicket) -> int | None:
        key = ticket.domain
        number = ticket.number
        began_at = time.time()
        seq = await self._bus.publish(
            self._stream, ticket, key=key, ticket=number, expected_last_seq=number - 1
        )
        if self._traces is not None:
            self._traces.add("grant", number, began_at, time.time())
        return seq


class TicketAges:
    """Times for which hubs have worked on the open tickets. Pure.

    Only what a hub reports counts: its first report of a ticket starts the ticket's time with this
    hub, and later ones prove the time in between. So a ticket does not age in a queue, between two
    hubs, or with a hub that cannot report. Nor does time count in which the run is paused or the
    ticket's domain is not served.

    Args:
        timeout_s: the time with one hub after which a ticket expires.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        # domain -> seconds that counted
        self._served_s: defaultdict[str, float] = defaultdict(float)
        # hub -> ticket -> seconds of its domain at the first report
        self._since: dict[str, dict[int, float]] = {}
        self._expired: set[int] = set()

    def passed(
        self,
        elapsed_s: float,
        waiting: Mapping[int, str],
        reports: Mapping[str, Collection[int] | None],
        served: Collection[str],
        *,
        paused: bool = False,
    ) -> list[int]:
        """Return the tickets that expired by the newest reports, each once.

        Args:
            elapsed_s: since the last call.
            waiting: number -> domain of the tickets without a record.
            reports: hub -> the tickets that it works on, None if it reported nothing new; without
                the hubs that left.
            served: domains with an environment hub, and with a reward hub for each of their pools.
            paused: whether the operator has paused the run.
        """
        if not paused:
            for domain in served:
                self._served_s[domain] += elapsed_s
        self._expired &= waiting.keys()
        self._since = {hub: since for hub, since in self._since.items() if hub in reports}
        expired = set[int]()
        for hub, tickets in reports.items():
            if tickets is None:
                continue
            earlier = self._since.get(hub, {})
            served_s = {
                number: self._served_s[waiting[number]] for number in tickets if number in waiting
            }
            self._since[hub] = {
                number: earlier.get(number, time_s) for number, time_s in served_s.items()
            }
            expired |= {
                number
                for number, since in self._since[hub].items()
                if served_s[number] - since >= self._timeout_s
            }
        new = expired - self._expired
        self._expired = self._expired | expired
        return sorted(new)


class TicketReaper:
    """Service that closes tickets that a hub works on for too long, by a record in the log.

    Args:
        is_paused: returns whether the operator has paused the run.
        pools: domain -> the reward pools that its groups visit.
        every_s: seconds between two checks.
    """

    def __init__(
        self,
        bus: Bus,
        ledger: Ledger,
        roster: Roster,
        timeout_s: float,
        is_paused: Callable[[], bool] = lambda: False,
        *,
        pools: Mapping[str, Collection[str]] = MappingProxyType({}),
        every_s: float = TICK_S,
    ) -> None:
        self._bus = bus
        self._ledger = ledger
        self._roster = roster
        self._timeout_s = timeout_s
        self._is_paused = is_paused
        self._ages = TicketAges(timeout_s)
        self._pools = pools
        self._every_s = every_s
        self._reporters: dict[str, wire.Presence] = {}  # hub -> its newest report

    async def serve(self) -> None:
        """Check every ``every_s`` seconds until cancelled."""
        loop = asyncio.get_running_loop()
        checked_at = loop.time()
        while True:
            await asyncio.sleep(self._every_s)
            waiting = {
                number: self._ledger.ticket(number).domain for number in self._ledger.waiting_for
            }
            reports = await self._reports(waiting)
            # A disconnected broker or a stalled event loop must not count as time that a hub had.
            elapsed_s = min(loop.time() - checked_at, 2 * self._every_s)
            checked_at = loop.time()
            for number in self._ages.passed(
                elapsed_s, waiting, reports, self._served(), paused=self._is_paused()
            ):
                detail = (
                    f"a hub worked on it for train.ticket_timeout_s = {self._timeout_s:g} s and "
                    "did not end it"
                )
                await close_by_timeout(self._bus, self._ledger, number, "timeout", detail)

    def _served(self) -> set[str]:
        """Return the domains that have a hub, and a hub for each of their reward pools."""
        domains, pools = (
            {name for hub in self._roster.alive(role) for name in hub.serves}
            for role in ("envhub", "rewardhub")
        )
        return {name for name in domains if pools.issuperset(self._pools.get(name, ()))}

    async def _reports(self, waiting: Mapping[int, str]) -> dict[str, Collection[int] | None]:
        """Return the new reports of the hubs that are alive.

        A hub of another program that does not say what it works on counts as working on every
        ticket of its domains that was delivered, is not acknowledged and is reported by no other
        hub.
        """
        hubs = {
            f"{role}.{hub.id}": hub
            for role in ("envhub", "rewardhub")
            for hub in self._roster.alive(role)
        }
        earlier = self._reporters
        self._reporters = hubs
        reports: dict[str, Collection[int] | None] = {
            name: hub.tickets if hub is not earlier.get(name) else None
            for name, hub in hubs.items()
        }
        silent = {
            name: hub for name, hub in hubs.items() if hub.role == "envhub" and hub.tickets is None
        }
        if silent:
            domains = sorted(
                {name for hub in silent.values() for name in hub.serves} & set(waiting.values())
            )
            newest = {name: await self._bus.last_delivered(TICKETS, name) for name in domains}
            delivered = {
                number for number, domain in waiting.items() if number <= newest.get(domain, 0)
            }
            delivered -= {number for hub in hubs.values() for number in hub.tickets or ()}
            delivered -= await self._bus.missing(TICKETS, delivered)
            for name, hub in silent.items():
                reports[name] = [number for number in delivered if waiting[number] in hub.serves]
        return reports


async def close_by_timeout(bus: Bus, ledger: Ledger, number: int, cause: str, detail: str) -> None:
    """Close a ticket by a record in the log, unless a record has arrived."""
    if number in ledger.waiting_for:
        domain = ledger.ticket(number).domain
        log.warning("ticket %d (%s) closed: %s", number, domain, detail)
        closed = wire.Closed(
            ticket=number, domain=domain, reason="timeout", detail=detail, by=bus.name
        )
        key = f"{cause}.{bus.run}.{number}"
        # If the store is full, only a step makes room, which may need the ticket's replacement.
        await bus.publish(SAMPLES, closed, ticket=number, message_id=key, is_essential=True)
