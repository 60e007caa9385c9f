"""Sends in-progress marks from a separate thread, which a busy event loop cannot starve."""

from __future__ import annotations

import asyncio
import logging
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from broker.identity.login import Login
from broker.nats.connection import NatsLink
from broker.nats.nats_errors import Disconnected, NoResponders

log = logging.getLogger(__name__)

IN_PROGRESS: Final = b"+WPI"
CONFIRM_WITHIN_S: Final = 3.0
LOOK_EVERY_S: Final = 0.5  # for due marks, and whether the event loop turns


@dataclass(slots=True)
class _Mark:
    """What is known of a held message."""

    subject: str  # of its newest delivery
    num_delivered: int
    period_s: float
    due_at: float  # monotonic time


class AckProgress:
    """Marks held messages as in progress, due ones together.

    A message has one mark, however often it was delivered to this process: the broker applies a mark to the message,
    so that of an older delivery would keep the message from others after the newest is settled.

    The thread has its own event loop and connection. If the process's event loop does not turn for ``hang_after_s()``
    seconds, the process counts as dead: marks stop, and other processes get its work.
    """

    def __init__(
        self, url: str, name: str, hang_after_s: Callable[[], float], find_login: Callable[[], Login] = Login
    ) -> None:
        self._url, self._name, self._hang_after_s, self._find_login = url, name, hang_after_s, find_login
        self._held: dict[tuple[str, int], _Mark] = {}  # by stream and sequence
        self._lock = threading.Lock()
        self._turned = time.monotonic()
        self._thread: threading.Thread | None = None
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)  # of the thread
        self._stop = asyncio.Event()  # of the thread's loop
        self._beat: asyncio.TimerHandle | None = None
        self._asking: asyncio.Task[None] | None = None  # checks that marks arrive

    def start(self) -> None:
        """Start marking and watching the running event loop, if not started yet."""
        if self._thread is None:
            self._turn()
            self._runner.get_loop()  # created here so that ``close`` can use it at any time
            self._thread = threading.Thread(target=self._run, name="in-progress-marks", daemon=True)
            self._thread.start()

    @property
    def num_held(self) -> int:
        """The number of held messages."""
        return len(self._held)

    def hold(self, ack_subject: str, period_s: float) -> bool:
        """Mark a delivery's message every ``period_s``, first within that time, to spread those that came together.

        Return whether an earlier delivery of it is held.
        """
        stream, num_delivered, seq = _message_of(ack_subject)
        due_at = time.monotonic() + period_s * random.random()
        with self._lock:
            known = self._held.get((stream, seq))
            if known is None or known.num_delivered <= num_delivered:
                self._held[stream, seq] = _Mark(ack_subject, num_delivered, period_s, due_at)
        return known is not None

    def release(self, ack_subject: str) -> None:
        """Stop marking a delivery's message, unless it was delivered to this process again."""
        stream, num_delivered, seq = _message_of(ack_subject)
        with self._lock:
            known = self._held.get((stream, seq))
            if known is not None and known.num_delivered <= num_delivered:
                del self._held[stream, seq]

    async def close(self) -> None:
        """Stop marking and wait for the thread."""
        if self._beat is not None:
            self._beat.cancel()
        if self._thread is not None:
            self._runner.get_loop().call_soon_threadsafe(self._stop.set)
            await asyncio.to_thread(self._thread.join)
            self._thread = None

    def _turn(self) -> None:
        self._turned = time.monotonic()
        self._beat = asyncio.get_running_loop().call_later(LOOK_EVERY_S, self._turn)

    def _run(self) -> None:
        with self._runner:
            self._runner.run(self._mark_forever())

    async def _mark_forever(self) -> None:
        link = NatsLink(self._url, f"{self._name} marks", self._find_login)
        opening = asyncio.create_task(link.open())
        hanging = False
        try:
            while not self._stop.is_set():
                await _wait(self._stop, LOOK_EVERY_S)
                stood_s = time.monotonic() - self._turned
                if (stood_s > self._hang_after_s()) != hanging:
                    hanging = not hanging
                    if hanging:
                        log.error("event loop blocked for %.1f s; other processes get its work", stood_s)
                    else:
                        log.info("event loop runs again")
                if not hanging:
                    await self._mark_due(link)
        finally:
            tasks = [opening] if self._asking is None else [opening, self._asking]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await link.close()

    async def _mark_due(self, link: NatsLink) -> None:
        now = time.monotonic()
        with self._lock:
            due = [mark for mark in self._held.values() if mark.due_at <= now]
            for mark in due:
                mark.due_at = now + mark.period_s
        may_ask = self._asking is None or self._asking.done()
        try:
            for mark in due[:-1] if may_ask else due:
                await link.send(mark.subject, IN_PROGRESS)
            if due and may_ask:
                self._asking = asyncio.create_task(_ask(link, due[-1]))
        except Disconnected:
            for mark in due:  # they are sent first when the broker is back
                mark.due_at = now


async def _ask(link: NatsLink, mark: _Mark) -> None:
    """Have one mark confirmed: a server cut off from its cluster accepts marks but does not pass them on."""
    try:
        await link.call(mark.subject, IN_PROGRESS, timeout_s=CONFIRM_WITHIN_S)
        link.trust("marks")
        return
    except Disconnected:
        log.debug("connection lost; the mark is sent again")
    except NoResponders:
        link.doubt("marks")
    except TimeoutError:
        link.doubt("marks", CONFIRM_WITHIN_S)
    mark.due_at = time.monotonic() + LOOK_EVERY_S  # it may not have arrived


def _message_of(ack_subject: str) -> tuple[str, int, int]:
    """Return (stream, times delivered, stream sequence) from an acknowledgement subject."""
    tokens = ack_subject.split(".")
    first = 2 if len(tokens) == 9 else 4  # longer with a JetStream domain and account in it
    return tokens[first], int(tokens[first + 2]), int(tokens[first + 3])


async def _wait(event: asyncio.Event, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return
