"""Closes tickets that were acknowledged although no record ends them, long before they would time
out.

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
class _Gone:
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
        self._gone: dict[int, _Gone] = {}

    def look(
        self,
        now: float,
        gone: Collection[int],
        scoring: tuple[int, int],
        log_end: int,
        position: int,
    ) -> list[int]:
        """Return the tickets that are found to be lost, each once.

        Args:
            now: seconds of any monotonic clock.
            gone: tickets that the ledger waits for and that have left their queue.
            scoring: first and last sequence of the reward queues, read after ``gone``; (last + 1,
                last) when they are
            empty.
            log_end: last sequence of the log, read after ``scoring``.
            position: of the ledger in the log.
        """
        self._gone = {
            number: self._gone.get(number) or _Gone(now, self._pools + 1, 0) for number in gone
        }
        found = sorted(self._gone.items())
        return [
            number for number, one in found if self._turns_out(one, now, scoring, log_end, position)
        ]

    def _turns_out(
        self, one: _Gone, now: float, scoring: tuple[int, int], log_end: int, position: int
    ) -> bool:
        first, last = scoring
        if one.passes and first > one.barrier:
            one.passes = one.passes - 1 if first <= last else 0
            one.barrier = last if one.passes else log_end
        if one.passes or position < one.barrier or now - one.since < self._grace_s or one.is_orphan:
            return False
        one.is_orphan = True
        return True


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
            gone = await self._bus.missing(TICKETS, self._ledger.waiting_for)
            scoring, (_, log_end) = (
                await self._bus.bounds(EPISODES),
                await self._bus.bounds(SAMPLES),
            )
            now = asyncio.get_running_loop().time()
            for number in self._orphans.look(
                now, gone, scoring, log_end, self._ledger.state.position
            ):
                await close_by_timeout(self._bus, self._ledger, number, "orphan", DETAIL)
