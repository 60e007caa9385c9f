"""Fetches tickets, never more than there is room for, in turn between the queues of a hub."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from broker.contract.streams import EVALTICKETS, Stream
from broker.jetstream.bus import Delivery, WorkQueue
from broker.jetstream.pulling import fetch_unless
from broker.runtime.process import Member
from envhub.scheduling.slots import EpisodeSlots

# between two checks whether tickets can be played
LOOK_S: Final = 1.0
# before the next fetch from an empty queue that had to make way
CROWDED_PAUSE_S: Final = 0.5
# evaluations take at most one slot in this many
EVAL_SHARE: Final = 2


class QueueTurns:
    """Gives room to one queue after the other, in the order of their requests."""

    def __init__(self, slots: EpisodeSlots) -> None:
        self.slots = slots
        self._line = asyncio.Lock()
        self._waiting = 0
        self._wanted = asyncio.Event()  # while a queue waits for room
        self._freed = asyncio.Event()

    def poke(self) -> None:
        """Note that slots may have been freed."""
        freed = self._freed
        self._freed = asyncio.Event()
        freed.set()

    async def changed(self) -> None:
        """Wait until slots may have been freed."""
        await self._freed.wait()

    async def wanted(self) -> None:
        """Wait until a queue waits for room."""
        await self._wanted.wait()

    async def reserve(self, group_size: int, limit: int) -> int:
        """Wait in line until there is room. Return for how many groups, at most ``limit``."""
        if not self._line.locked() and (count := self.slots.reserve(group_size, limit)):
            return count
        self._waiting += 1
        self._wanted.set()
        try:
            async with self._line:
                while not (count := self.slots.reserve(group_size, limit)):
                    await self._freed.wait()
                return count
        finally:
            self._waiting -= 1
            if not self._waiting:
                self._wanted.clear()

    def release(self, group_size: int, count: int) -> None:
        """Release what ``reserve`` reserved."""
        self.slots.release(group_size, count)
        self.poke()

    @property
    def crowded(self) -> bool:
        """Whether another queue waits for room."""
        return self._waiting > 0


@dataclass
class TicketFeed:
    """One queue of tickets.

    Attributes:
        member: for the broker and the operator's commands.
        queue_turns: shared by all queues of the hub.
        stream: tickets or evaltickets.
        domain: key of the queue.
        group_size: expected of the next tickets; each ticket corrects it.
        accept: takes one delivery and returns the size of its group, 0 if it is not a ticket.
        in_hand: episodes of this stream's tickets that the hub has taken.
        ready: whether tickets of this stream can be played at present.
        changed: returns when that may have changed, or after the given seconds.
    """

    member: Member
    queue_turns: QueueTurns
    stream: Stream
    domain: str
    group_size: int
    accept: Callable[[Stream, str, Delivery], int]
    in_hand: Callable[[Stream], int]
    ready: Callable[[Stream], bool]
    changed: Callable[[float], Awaitable[None]]

    def __post_init__(self) -> None:
        self._had_tickets = False  # at the last fetch

    async def run(self) -> None:
        """Fetch until cancelled; what has arrived is then handed back."""
        queue = await self.member.bus.work_queue(self.stream, self.domain)
        while True:
            await self.member.running.wait()
            if not self.ready(self.stream):
                await self.changed(LOOK_S)
            elif (limit := self._most()) <= 0:
                await self.queue_turns.changed()
            else:
                await self._fetch(queue, limit)

    def _most(self) -> int:
        """Return how many more groups this queue may have."""
        slots = self.queue_turns.slots.n
        if self.stream is not EVALTICKETS:
            return max(1, slots // self.group_size)
        in_hand = self.in_hand(self.stream)
        # one group at least, or a group larger than the share would never be evaluated
        return max((slots // EVAL_SHARE - in_hand) // self.group_size, int(not in_hand))

    async def _unready(self) -> None:
        while self.ready(self.stream):
            await self.changed(LOOK_S)

    async def _fetch(self, queue: WorkQueue, limit: int) -> None:
        size = self.group_size
        # a queue that was empty gets room for one group only, and makes way for others
        count = await self.queue_turns.reserve(size, limit if self._had_tickets else 1)
        try:
            if self.queue_turns.crowded:
                deliveries = await queue.fetch(count, 0.0)
            else:
                deliveries = await fetch_unless(
                    queue,
                    count,
                    self.queue_turns.wanted(),
                    self.member.pausing.wait(),
                    self._unready(),
                )
        finally:
            self.queue_turns.release(size, count)
        self._had_tickets = bool(deliveries)
        for delivery in deliveries:
            self.group_size = self.accept(self.stream, self.domain, delivery) or self.group_size
        if not deliveries and self.queue_turns.crowded:
            await asyncio.sleep(CROWDED_PAUSE_S)
