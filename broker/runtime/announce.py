"""Tells others that a process is there: a beat every second or two for those who listen, an entry among the members for
all.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from typing import Final

from broker.contract import codec, wire
from broker.contract.streams import MEMBERS, PRESENCE
from broker.errors import LostState
from broker.jetstream.bus import Bus
from broker.nats.nats_errors import Disconnected

log = logging.getLogger(__name__)

BEAT_S: Final = 1.0
REFRESH_S: Final = MEMBERS.ttl_s / 3  # two puts may be lost before the entry expires
FAREWELL_WITHIN_S: Final = 2.0


def member_key(run: str, role: str, process_id: str) -> str:
    """The key of one process in the members bucket."""
    return f"{run}.{role}.{process_id}"


def decides(presence: wire.Presence) -> tuple[object, ...]:
    """What others decide on for longer than a second; a change of it is put among the members at once."""
    one = presence
    return one.state, one.address, one.policy, tuple(one.serves), one.problem


class Announcer:
    """Publishes ``describe()`` every second (at once on ``poke``) and keeps the process's entry among the members.

    While nothing changes, every other beat is left out. A beat costs the broker one message, and nothing more when
    nobody listens. The entry is put when something that others decide on has changed, and again every 20 seconds or so;
    ``close`` deletes it.
    """

    def __init__(
        self, bus: Bus, describe: Callable[[], wire.Presence], *, every_s: float = BEAT_S, refresh_s: float = REFRESH_S
    ) -> None:
        self._bus, self._describe, self._every_s, self._refresh_s = bus, describe, every_s, refresh_s
        self._poked, self._due = asyncio.Event(), asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._beaten: wire.Presence | None = None  # by the last beat; None: it was left out, or did not leave
        self._put: tuple[object, ...] | None = None  # what the entry says
        self._key = ""
        self._is_made = True  # the bucket, as far as known

    async def start(self) -> None:
        """Begin; the entry is put before this returns, once the broker is there."""
        self._bus.link.on_disconnect.add(self._lost)
        await self._enter()
        await self._beat()
        self._tasks = [asyncio.create_task(self._keep_beating()), asyncio.create_task(self._keep_entered())]

    async def serve(self) -> None:
        """Start, and go on until cancelled; fails when ``describe`` does."""
        await self.start()
        await asyncio.gather(*self._tasks)

    def poke(self) -> None:
        """Tell it now; something has changed."""
        self._poked.set()

    async def close(self) -> None:
        """Say farewell, if the broker is there to hear it."""
        self._bus.link.on_disconnect.discard(self._lost)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if not self._key:
            return
        try:
            async with asyncio.timeout(FAREWELL_WITHIN_S):
                await (await self._bus.key_value(MEMBERS)).delete(self._key)
        except (TimeoutError, Disconnected, LostState):
            log.debug("no farewell; the entry expires by itself")

    def _lost(self) -> None:
        """The broker may come back without what it held in memory."""
        self._is_made = False
        self._due.set()

    async def _keep_beating(self) -> None:
        while True:
            await _wait(self._poked, self._every_s)
            if self._describe() == self._beaten:
                self._beaten = None
            else:
                await self._beat()

    async def _beat(self) -> None:
        presence = self._describe()
        if decides(presence) != self._put:
            self._due.set()
        try:
            await self._bus.link.send(
                PRESENCE.subject(self._bus.run, f"{presence.role}.{presence.id}"), codec.encode(presence)
            )
        except Disconnected:
            log.debug("no beat without a connection")
        else:
            self._beaten = presence

    async def _keep_entered(self) -> None:
        while True:
            await _wait(self._due, self._refresh_s * random.uniform(0.8, 1.2))
            await self._enter()

    async def _enter(self) -> None:
        await self._bus.link.ready()
        bucket = await self._bus.key_value(MEMBERS)
        if not self._is_made:
            await bucket.ensure()
            self._is_made = True
        presence = self._describe()
        self._key = member_key(self._bus.run, presence.role, presence.id)
        try:
            await bucket.put(self._key, presence)
        except LostState:
            self._lost()
            return
        self._put = decides(presence)


async def _wait(event: asyncio.Event, timeout_s: float) -> None:
    """Until it is set, which is cleared, or the time is over."""
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return
    event.clear()
