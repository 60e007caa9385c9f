"""Closes tickets that were acknowledged although no record ends them, before they time out.

A hub stores a ticket's group first and acknowledges the ticket afterwards; a reward hub does the
same with the group. So a ticket that has left its queue has a message in the reward queues or a
record in the log, unless a hub lost it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from broker.contract.streams import EPISODES, SAMPLES, TICKETS
from broker.jetstream.bus import Bus
from learner.credit.ledger import Ledger
from learner.credit.tickets import close_by_timeout

LOOK_EVERY_S: Final = 5.0
GRACE_S: Final = 15.0
DETAIL: Final = "acknowledged, but neither its group nor a closing was stored before"


@dataclass
class _Absence:
    since: float
    passes: int  # of the reward queues that its group may still be in
    barrier: int  # of those queues; of the log once no pass is left
    is_orphan: bool = False


class OrphanDetector:
    """Detector of lost tickets among those whose group may be in flight. Pure.

    A group that was in the reward queues when its ticket left lies before their last sequence of
    that time. When all up to there have left, it is in the next pool, before the last sequence of
    this time, or in the log. After one pass per pool it is in the log, before its end; once the
    ledger has read that far without a record, there is none.

    Args:
        pools: largest number of reward queues that a group visits.
        grace_s: least time since a ticket left its queue.
    """

    def __init__(self, pools: int, grace_s: float) -> None:
        self._pools = pools
        self._grace_s = grace_s
        self._absences: dict[int, _Absence] = {}

    def look(
        self,
        now: float,
        absent: Collection[int],
        scoring: tuple[int, int],
        log_end: int,
        position: int,
    ) -> list[int]:
        """Return the tickets that were lost, each once.

        Args:
            now: seconds of any monotonic clock.
            absent: tickets that the ledger waits for and that have left their queue.
            scoring: first and last sequence of the reward queues, read after ``absent``; (last + 1,
                last) when they are empty.
            log_end: last sequence of the log, read after ``scoring``.
            position: of the ledger in the log.
        """
        self._absences = {
            number: self._absences.get(number) or _Absence(now, self._pools + 1, 0)
            for number in absent
        }
        for absence in self._absences.values():
            self._update_barrier(absence, scoring, log_end)
        orphans = []
        for number, absence in sorted(self._absences.items()):
            is_over = not absence.passes and position >= absence.barrier
            if is_over and now - absence.since >= self._grace_s and not absence.is_orphan:
                absence.is_orphan = True
                orphans.append(number)
        return orphans

    def _update_barrier(self, absence: _Absence, scoring: tuple[int, int], log_end: int) -> None:
        first, last = scoring
        if absence.passes and first > absence.barrier:
            absence.passes = absence.passes - 1 if first <= last else 0
            absence.barrier = last if absence.passes else log_end


class OrphanReaper:
    """Service that closes lost tickets by a record in the log.

    Args:
        pools: largest number of reward queues that a group visits.
    """

    def __init__(self, bus: Bus, ledger: Ledger, pools: int) -> None:
        self._bus = bus
        self._ledger = ledger
        self._orphans = OrphanDetector(pools, GRACE_S)

    async def serve(self) -> None:
        """Check every few seconds until cancelled."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            # In this order: a group moves from the tickets to the episodes, and on to the samples.
            absent = await self._bus.missing(TICKETS, self._ledger.waiting_for)
            scoring = await self._bus.bounds(EPISODES)
            _, log_end = await self._bus.bounds(SAMPLES)
            now = asyncio.get_running_loop().time()
            for number in self._orphans.look(
                now, absent, scoring, log_end, self._ledger.state.position
            ):
                await close_by_timeout(self._bus, self._ledger, number, "orphan", DETAIL)
