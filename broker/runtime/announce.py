"""Announces a process: a beat every second or two, and an entry in the members bucket."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from typing import Final

import msgspec

from broker.contract import codec, wire
from broker.contract.streams import MEMBERS, PRESENCE
from broker.errors import LostState
from broker.jetstream.bus import Bus
from broker.nats.nats_errors import Disconnected
from broker.runtime.vouching import PresenceSigner

log = logging.getLogger(__name__)

BEAT_S: Final = 1.0
# Two puts may be lost before the entry expires.
REFRESH_S: Final = MEMBERS.ttl_s / 3
FAREWELL_WITHIN_S: Final = 2.0


def member_key(run: str, role: str, process_id: str) -> str:
    """Return the key of a process in the members bucket."""
    return f"{run}.{role}.{process_id}"


def decides(presence: wire.Presence) -> tuple[object, ...]:
    """Return what others decide on for longer than a second; a change updates the entry."""
    is_measured = presence.base_s + presence.each_s > 0
    return (
        presence.state,
        presence.address,
        presence.policy,
        tuple(presence.serves),
        presence.problem,
        presence.key,
        is_measured,
    )


class Announcer:
    """Publishes ``describe()`` every second and after ``poke``; keeps the members entry.

    Every other beat is omitted while nothing changes. A beat costs the broker one message. The
    entry is put when a value that others decide on changes, and about every 20 seconds; ``close``
    deletes it.
    """

    def __init__(
        self,
        bus: Bus,
        describe: Callable[[], wire.Presence],
        *,
        every_s: float = BEAT_S,
        refresh_s: float = REFRESH_S,
    ) -> None:
        self._bus = bus
        self._every_s = every_s
        self._refresh_s = refresh_s
        self._signer = PresenceSigner(bus)
        self._plain = describe
        self._poked = asyncio.Event()
        self._due = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        # The last beat; None: omitted or not sent.
        self._beaten: wire.Presence | None = None
        self._put: tuple[object, ...] | None = None  # content of the entry
        self._key = ""
        # Whether the bucket exists, as far as known.
        self._is_made = True

    async def start(self) -> None:
        """Begin; put the entry before returning, once the broker is available."""
        self._bus.link.on_disconnect.add(self._lost)
        await self._enter()
        await self._beat()
        self._tasks = [
            asyncio.create_task(self._keep_beating()),
            asyncio.create_task(self._keep_entered()),
        ]

    async def serve(self) -> None:
        """Start and run until cancelled; fails when ``describe`` does."""
        await self.start()
        await asyncio.gather(*self._tasks)

    def poke(self) -> None:
        """Publish now, because something has changed."""
        self._poked.set()

    async def close(self) -> None:
        """Stop, and delete the entry if the broker is available."""
        self._bus.link.on_disconnect.discard(self._lost)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if not self._key:
            return
        try:
            async with asyncio.timeout(FAREWELL_WITHIN_S):
                await self._bus.key_value(MEMBERS).delete(self._key)
        except (TimeoutError, Disconnected, LostState):
            log.debug("the entry was not deleted; it expires by itself")

    def _lost(self) -> None:
        """Note that the broker may come back without its memory."""
        self._is_made = False
        self._due.set()

    def _describe(self) -> wire.Presence:
        return self._signer.signed(self._plain())

    def _describe_beat(self) -> wire.Presence:
        """Return the presence without its tickets: thousands, and for the learner only."""
        return msgspec.structs.replace(self._describe(), tickets=None)

    async def _keep_beating(self) -> None:
        while True:
            await _wait_for_change(self._poked, self._every_s)
            if self._describe_beat() == self._beaten:
                self._beaten = None
            else:
                await self._beat()

    async def _beat(self) -> None:
        presence = self._describe_beat()
        if decides(presence) != self._put:
            self._due.set()
        try:
            subject = PRESENCE.subject(self._bus.run, f"{presence.role}.{presence.id}")
            await self._bus.link.send(subject, codec.encode(presence))
        except Disconnected:
            log.debug("no beat without a connection")
        else:
            self._beaten = presence

    async def _keep_entered(self) -> None:
        while True:
            await _wait_for_change(self._due, self._refresh_s * random.uniform(0.8, 1.2))
            await self._enter()

    async def _enter(self) -> None:
        await self._bus.link.ready()
        bucket = self._bus.key_value(MEMBERS)
        if not self._is_made:
            await self._bus.ensure_memory()
            self._is_made = True
        presence = self._describe()
        self._key = member_key(self._bus.run, presence.role, presence.id)
        try:
            await bucket.put(self._key, presence)
        except LostState:
            self._lost()
            return
        self._put = decides(presence)


async def _wait_for_change(event: asyncio.Event, timeout_s: float) -> None:
    """Wait until the event is set, and clear it, or until the time is over."""
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return
    event.clear()
