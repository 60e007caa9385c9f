"""Decides which hubs may send requests over the network: those whose key a live presence of the run
announces.

The keys of admitted hubs are followed one by one. Only while an unknown key waits does a server
hear all hubs, so that its cost does not grow with the fleet.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from broker.contract import wire
from broker.contract.streams import PRESENCE
from broker.errors import RlearnerError
from broker.jetstream.bus import Bus
from broker.jetstream.delivery import decode_message
from broker.nats.client import Msg
from broker.nats.subscription import LinkSubscription
from broker.runtime.presence import beat_of
from broker.runtime.vouching import PresenceVerifier

log = logging.getLogger(__name__)

ROLES: Final = ("envhub", "learner")  # that send requests; a learner asks a served teacher
TICK_S: Final = 0.25
WAIT_S: Final = 3.0  # for the presence of an unknown key; a hub announces itself every two seconds
# without presence: a hub that is blocked for some seconds keeps its requests
SILENT_S: Final = 20.0
LISTEN_S: Final = 5.0  # after the last unknown key
MAX_WAITING: Final = 256
MAX_WAITING_OF_HOST: Final = 16
MAX_KEYS: Final = 10_000
BAN_S: Final = 60.0

Answer = Callable[[bool], None]


class HubAdmission:
    """The admitted keys of one server, by the beats of hubs.

    Args:
        on_removed: called with each key that is no longer admitted.
    """

    def __init__(self, bus: Bus, on_removed: Callable[[str], None]) -> None:
        self._bus = bus
        self._on_removed = on_removed
        self._verifier = PresenceVerifier(bus)
        # seconds in which this process was listening, as in ``broker.runtime.presence``
        self.clock = 0.0
        self._keys: dict[str, float] = {}  # admitted, when last heard
        self._subject: dict[str, str] = {}  # of each admitted key
        self._banned: dict[str, float] = {}  # until when
        # by key: deadline, host, what to call
        self._waiting: dict[str, list[tuple[float, str, Answer]]] = {}
        self._all: list[LinkSubscription] = []
        self._followed: dict[str, LinkSubscription] = {}  # by subject
        self._needed_at = -LISTEN_S
        self._tasks: list[asyncio.Task[None]] = []
        self._news = asyncio.Event()

    async def start(self) -> None:
        """Begin to listen."""
        self._tasks = [asyncio.create_task(self._tick()), asyncio.create_task(self._subscribe())]

    async def close(self) -> None:
        """Stop listening, and refuse the keys that wait."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for waiting in list(self._waiting.values()):
            for _, _, answer in waiting:
                answer(False)
        self._waiting.clear()
        for subscribed in [*self._all, *self._followed.values()]:
            await subscribed.close()

    def admits(self, key: str) -> bool:
        """Return whether a hub may send requests."""
        return key in self._keys

    def ask(self, key: str, host: str, answer: Answer) -> None:
        """Call back whether a key is admitted: at once, or when its presence is heard or too late.

        Args:
            host: address of the peer, of which only some may wait.
        """
        if key in self._keys:
            answer(True)
            return
        of_host = sum(
            host == waiting_host
            for waiting in self._waiting.values()
            for _, waiting_host, _ in waiting
        )
        full = (
            of_host >= MAX_WAITING_OF_HOST or sum(map(len, self._waiting.values())) >= MAX_WAITING
        )
        if full or self._banned.get(key, 0.0) > self.clock:
            answer(False)
            return
        self._waiting.setdefault(key, []).append((self.clock + WAIT_S, host, answer))
        self._needed_at = self.clock
        self._news.set()

    def ban(self, key: str) -> None:
        """Refuse a key for a minute."""
        self._banned[key] = self.clock + BAN_S
        self._forget(key)

    async def _on_beat(self, message: Msg) -> None:
        presence, _ = decode_message(message.data, PRESENCE.messages)
        if (
            not isinstance(presence, wire.Presence)
            or presence.role not in ROLES
            or not presence.key
        ):
            return
        key = presence.key
        subject = message.subject
        waits = (
            key in self._waiting
            and self._banned.get(key, 0.0) <= self.clock
            and len(self._keys) < MAX_KEYS
        )
        if (key not in self._keys and not waits) or not self._verifier.accepts(
            presence, beat_of(subject)
        ):
            return
        if key not in self._keys:
            log.info("admitting %s %s", presence.role, presence.id)
        self._keys[key] = self.clock
        self._subject[key] = subject
        for _, _, answer in self._waiting.pop(key, []):
            answer(True)
        self._news.set()

    def _forget(self, key: str) -> None:
        if self._keys.pop(key, None) is not None:
            del self._subject[key]
            self._on_removed(key)
            self._news.set()

    async def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        last = loop.time()
        while True:
            await asyncio.sleep(TICK_S)
            now = loop.time()
            if self._bus.link.connected.is_set():
                self.clock += min(now - last, 2 * TICK_S)
            last = now
            for key in [key for key, at in self._keys.items() if self.clock - at > SILENT_S]:
                self._forget(key)
            for key, waiting in list(self._waiting.items()):
                for late in [entry for entry in waiting if entry[0] <= self.clock]:
                    waiting.remove(late)
                    log.warning(
                        "refused %s: no hub of this run that is present has its key", late[1]
                    )
                    late[2](False)
                if not waiting:
                    del self._waiting[key]
            self._banned = {key: until for key, until in self._banned.items() if until > self.clock}
            if self._all and self.clock - self._needed_at > LISTEN_S:
                self._news.set()

    async def _subscribe(self) -> None:
        """Hear all hubs while a key waits, and those with admitted keys always."""
        link = self._bus.link
        run = self._bus.run
        while True:
            await self._news.wait()
            self._news.clear()
            try:
                admitted_subjects = set(self._subject.values())
                for subject in admitted_subjects - set(self._followed):
                    self._followed[subject] = await link.subscribe(subject, self._on_beat)
                for subject in set(self._followed) - admitted_subjects:
                    await self._followed.pop(subject).close()
                needed = self.clock - self._needed_at <= LISTEN_S
                if needed and not self._all:
                    subjects = [PRESENCE.all_subjects(run, role) for role in ROLES]
                    self._all = [
                        await link.subscribe(subject, self._on_beat) for subject in subjects
                    ]
                elif not needed:
                    while self._all:
                        await self._all.pop().close()
            except RlearnerError as error:
                log.debug("cannot listen to hubs: %s", error)
