"""Keeps track of other processes: servers by beats, hubs by entries in the members bucket."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Final

from broker.contract import wire
from broker.contract.streams import MEMBERS, PRESENCE, ROLES
from broker.jetstream.bus import Bus
from broker.jetstream.delivery import decode_message
from broker.nats.client import Msg
from broker.nats.subscription import LinkSubscription
from broker.runtime.vouching import PresenceVerifier

log = logging.getLogger(__name__)

TICK_S: Final = 0.5
SILENT_AFTER_S: Final = 5.0  # without a beat
CENSUS_S: Final = 3.0


@dataclass(frozen=True)
class _Seen:
    presence: wire.Presence
    at: float  # on the roster's own clock
    ttl_s: float


class Roster:
    """Living processes of this run, by role; watches only the given roles.

    A process is alive if it was heard within a time on this process's clock: 5 s for roles followed
    by beats, 60 s for roles followed by the members bucket, which costs a message per process each
    20 s instead of each second. The clock stops while this process's event loop or the broker does,
    because silence then says nothing about the others.

    Args:
        beats: roles to follow by their beats.
        members: roles to follow by their entries among the members.
        on_change: called with each process that is heard, and with False when it is gone.

    Attributes:
        clock: seconds in which this process was listening.
    """

    def __init__(
        self,
        bus: Bus,
        *,
        beats: Sequence[str] = ROLES,
        members: Sequence[str] = (),
        ttl_s: float = SILENT_AFTER_S,
        on_change: Callable[[wire.Presence, bool], None] = lambda presence, is_there: None,
    ) -> None:
        self._bus = bus
        self._beats = beats
        self._members = members
        self._ttl_s = ttl_s
        self._on_change = on_change
        self._verifier = PresenceVerifier(bus)
        self.clock = 0.0
        self._seen: dict[str, _Seen] = {}  # by role.id
        # by role, until anyone comes, goes or changes
        self._living: dict[str, list[wire.Presence]] = {}
        self._changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._subscribed: list[LinkSubscription] = []
        # Single processes, by role.id.
        self._followed: dict[str, LinkSubscription] = {}

    async def start(self) -> None:
        """Begin to listen; existing processes are known a moment later."""
        for role in self._beats:
            subject = PRESENCE.all_subjects(self._bus.run, role)
            self._subscribed.append(await self._bus.link.subscribe(subject, self._on_beat))
        for role in (*self._beats, *self._members):
            on_presence = self.hear if role in self._beats else self._hear_member
            self._subscribed.append(
                await listen(
                    self._bus, role, on_presence, self._verifier, read=role in self._members
                )
            )
        self._tasks = [asyncio.create_task(self._tick())]

    async def serve(self) -> None:
        """Start and run until cancelled."""
        await self.start()
        await asyncio.gather(*self._tasks)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for subscribed in [*self._subscribed, *self._followed.values()]:
            await subscribed.close()
        self._subscribed.clear()
        self._followed.clear()

    async def follow(self, role: str, ids: Collection[str]) -> None:
        """Follow the beats of exactly these processes of a role, and forget others."""
        wanted_keys = {f"{role}.{process_id}" for process_id in ids}
        for key in [
            key for key in self._followed if key.startswith(f"{role}.") and key not in wanted_keys
        ]:
            await self._followed.pop(key).close()
            self._forget(key)
        for key in sorted(wanted_keys - set(self._followed)):
            self._followed[key] = await self._bus.link.subscribe(
                PRESENCE.subject(self._bus.run, key), self._on_beat
            )

    def alive(self, role: str) -> list[wire.Presence]:
        """Return the newest presence of each living process of a role, ordered by id."""
        living = self._living.get(role)
        if living is None:
            presences = [
                sighting.presence
                for sighting in self._seen.values()
                if sighting.presence.role == role and self._lives(sighting)
            ]
            living = self._living[role] = sorted(presences, key=lambda presence: presence.id)
        return list(living)

    def get(self, process_id: str) -> wire.Presence | None:
        """Return the presence of a living process, or None."""
        for sighting in self._seen.values():
            if sighting.presence.id == process_id and self._lives(sighting):
                return sighting.presence
        return None

    async def changed(self, timeout_s: float) -> None:
        """Wait until a process joins, leaves or changes, or until the timeout."""
        event = self._changed
        try:
            async with asyncio.timeout(timeout_s):
                await event.wait()
        except TimeoutError:
            return

    def hear(self, key: str, presence: wire.Presence | None) -> None:
        """Take the presence of process ``role.id``; None: it left."""
        self._hear(key, presence, self._ttl_s)

    def _hear_member(self, key: str, presence: wire.Presence | None) -> None:
        self._hear(key, presence, MEMBERS.ttl_s)

    def _hear(self, key: str, presence: wire.Presence | None, ttl_s: float) -> None:
        if presence is None:
            self._forget(key)
            return
        last_sighting = self._seen.get(key)
        self._seen[key] = _Seen(presence, self.clock, ttl_s)
        self._living.pop(presence.role, None)
        self._on_change(presence, True)
        if (
            last_sighting is None
            or last_sighting.presence != presence
            or not self._lives(last_sighting)
        ):
            self._tell()

    def _forget(self, key: str) -> None:
        sighting = self._seen.pop(key, None)
        if sighting is not None:
            self._living.clear()
            self._on_change(sighting.presence, False)
            self._tell()

    def _lives(self, sighting: _Seen) -> bool:
        return self.clock - sighting.at < sighting.ttl_s

    def _tell(self) -> None:
        event = self._changed
        self._changed = asyncio.Event()
        event.set()

    async def _on_beat(self, message: Msg) -> None:
        presence, error = decode_message(message.data, PRESENCE.messages)
        key = beat_of(message.subject)
        if presence is None:
            log.warning("%s: %s", message.subject, error)
        elif self._verifier.accepts(presence, key):
            self.hear(key, presence)

    async def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        last = loop.time()
        while True:
            await asyncio.sleep(TICK_S)
            now = loop.time()
            if self._bus.link.connected.is_set():
                self.clock += min(now - last, 2 * TICK_S)
            last = now
            for key in [key for key, sighting in self._seen.items() if not self._lives(sighting)]:
                self._forget(key)


async def listen(
    bus: Bus,
    role: str,
    on_change: Callable[[str, wire.Presence | None], None],
    verifier: PresenceVerifier,
    *,
    read: bool,
) -> LinkSubscription:
    """Call back with (role.id, presence, None if it left) for each new members entry of a role.

    Args:
        read: also call back with the existing entries; each is at most 60 s old.
    """
    bucket = bus.key_value(MEMBERS)
    updated_keys: set[str] = set()
    is_reading = read

    def follow_entry(key: str, message: wire.Message | None) -> None:
        if is_reading:
            updated_keys.add(key)
        name = key.removeprefix(f"{bus.run}.")
        if message is None or verifier.accepts(message, name):
            on_change(name, message)

    subscribed = await bucket.tap(f"{bus.run}.{role}", follow_entry)
    if read:
        for key, message in (await bucket.values(f"{bus.run}.{role}")).items():
            name = key.removeprefix(f"{bus.run}.")
            if key not in updated_keys and verifier.accepts(message, name):  # the update is newer
                on_change(name, message)
    is_reading = False
    return subscribed


def beat_of(subject: str) -> str:
    """Return role.id of the process that may publish on a beat's subject."""
    return ".".join(subject.split(".")[3:])


async def census(bus: Bus, run: str, within_s: float = CENSUS_S) -> list[wire.Presence]:
    """Return a run's processes heard within a time, by role and id; stop early if complete."""
    presences: dict[str, wire.Presence] = {}
    news = asyncio.Event()
    verifier = PresenceVerifier(bus, run)

    async def on_beat(message: Msg) -> None:
        presence, _ = decode_message(message.data, PRESENCE.messages)
        if verifier.accepts(presence, beat_of(message.subject)):
            presences[f"{run}.{presence.role}.{presence.id}"] = presence
            news.set()

    subscribed = await bus.link.subscribe(PRESENCE.all_subjects(run), on_beat)
    try:
        async with asyncio.timeout(within_s):
            members = await bus.key_value(MEMBERS, run).values(run)
            while not set(members) <= set(presences):
                await news.wait()
                news.clear()
    except TimeoutError:
        log.debug("some members of %s were not heard", run)
    finally:
        await subscribed.close()
    return [presences[key] for key in sorted(presences)]


def display_name(role: str, process_id: str) -> str:
    """Return the id for display, after its role unless it starts with it, as generated ids do."""
    return process_id if process_id.startswith(role) else f"{role} {process_id}"
