"""Sends in-progress marks from a separate thread, which a busy event loop cannot starve."""

from __future__ import annotations

import asyncio
import logging
import random
import threading
import time
from collections.abc import Callable

from broker.contract.streams import IN_PROGRESS_EVERY_S
from broker.identity.login import Login
from broker.nats.connection import NatsLink
from broker.nats.nats_errors import Disconnected, NoResponders

log = logging.getLogger(__name__)

IN_PROGRESS = b"+WPI"
CONFIRM_WITHIN_S = 3.0


class AckProgress:
    """Marks held deliveries as in progress every two seconds, due ones together.

    The thread has its own event loop and connection. If the process's event loop does not turn for ``hang_after_s()``
    seconds, the process counts as dead: marks stop, and other processes get its work.
    """

    def __init__(
        self, url: str, name: str, hang_after_s: Callable[[], float], find_login: Callable[[], Login] = Login
    ) -> None:
        self._url, self._name, self._hang_after_s, self._find_login = url, name, hang_after_s, find_login
        self._held: dict[str, float] = {}  # acknowledgement subject -> monotonic time of the next mark
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

    def hold(self, ack_subject: str) -> None:
        """Mark this delivery every two seconds, first after one to two, to spread deliveries that arrived together."""
        with self._lock:
            self._held[ack_subject] = time.monotonic() + IN_PROGRESS_EVERY_S * random.uniform(0.5, 1.0)

    def release(self, ack_subject: str) -> None:
        """Stop marking this delivery."""
        with self._lock:
            self._held.pop(ack_subject, None)

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
        self._beat = asyncio.get_running_loop().call_later(IN_PROGRESS_EVERY_S / 4, self._turn)

    def _run(self) -> None:
        with self._runner:
            self._runner.run(self._mark_forever())

    async def _mark_forever(self) -> None:
        link = NatsLink(self._url, f"{self._name} marks", self._find_login)
        opening = asyncio.create_task(link.open())
        hanging = False
        try:
            while not self._stop.is_set():
                await _wait(self._stop, IN_PROGRESS_EVERY_S / 4)
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
            due = [subject for subject, at in self._held.items() if at <= now]
            for subject in due:
                self._held[subject] = now + IN_PROGRESS_EVERY_S
        try:
            for subject in due:
                await link.send(subject, IN_PROGRESS)
            if due and (self._asking is None or self._asking.done()):
                self._asking = asyncio.create_task(_ask(link, due[-1]))
        except Disconnected:
            with self._lock:  # they are sent first when the broker is back
                self._held.update({subject: now for subject in due if subject in self._held})


async def _ask(link: NatsLink, subject: str) -> None:
    """Have one mark confirmed: a server cut off from its cluster accepts marks but does not pass them on."""
    try:
        await link.call(subject, IN_PROGRESS, timeout_s=CONFIRM_WITHIN_S)
    except Disconnected:
        log.debug("connection lost; the mark is sent again")
    except NoResponders:
        link.doubt("marks")
    except TimeoutError:
        link.doubt("marks", CONFIRM_WITHIN_S)
    else:
        link.trust("marks")


async def _wait(event: asyncio.Event, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return
