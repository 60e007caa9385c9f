"""Sends in-progress marks from a separate thread, which a busy event loop cannot starve."""

from __future__ import annotations

import asyncio
import logging
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from broker.contract.streams import ACK_WAIT_S, IN_PROGRESS_EVERY_S
from broker.identity.login import Login
from broker.nats.connection import NatsLink
from broker.nats.nats_errors import Disconnected, NoResponders

log = logging.getLogger(__name__)

IN_PROGRESS = b"+WPI"
CONFIRM_WITHIN_S = 3.0


@dataclass
class _Mark:
    """Times of one delivery, in seconds of ``_now``."""

    due_at: float  # of the next mark
    received_at: float
    marked_at: float  # of the newest mark that was sent
    is_certain: bool = True  # whether the broker has confirmed marks all the time


class AckProgress:
    """Marks held deliveries as in progress every two seconds, due ones together.

    The thread has its own event loop and connection. If the process's event loop does not turn for ``hang_after_s()``
    seconds, the process counts as dead: marks stop, and other processes get its work.

    A delivery that had no mark for as long as the broker waits has lapsed: others may hold its message, so it is never
    marked again. While the broker itself was down or had no leader, it served no other process either, so the holder
    goes on; but the broker may deliver the message again, so the holder may no longer decide how it ends.
    """

    def __init__(
        self, url: str, name: str, hang_after_s: Callable[[], float], find_login: Callable[[], Login] = Login
    ) -> None:
        self._url, self._name, self._hang_after_s, self._find_login = url, name, hang_after_s, find_login
        self._held: dict[str, _Mark] = {}  # by acknowledgement subject
        self._lapsed: set[str] = set()
        self._confirmed_at = 0.0  # when the newest mark was sent that the broker confirmed
        self._server = ""  # to which the thread is connected
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
        now = _now()
        with self._lock:
            self._held[ack_subject] = _Mark(now + IN_PROGRESS_EVERY_S * random.uniform(0.5, 1.0), now, now)

    def release(self, ack_subject: str) -> None:
        """Stop marking this delivery."""
        with self._lock:
            self._held.pop(ack_subject, None)
            self._lapsed.discard(ack_subject)

    def has_lapsed(self, ack_subject: str) -> bool:
        """Return whether others may hold a delivery's message by now, because its marks stopped for too long."""
        with self._lock:
            mark = self._held.get(ack_subject)
            return ack_subject in self._lapsed or (mark is not None and _now() - mark.marked_at > ACK_WAIT_S)

    def is_proven(self, ack_subject: str) -> bool:
        """Return whether only this process can hold a delivery's message: the broker has confirmed a mark in time."""
        with self._lock:
            mark = self._held.get(ack_subject)
            if mark is None or not mark.is_certain:
                return False
            return _now() - max(mark.received_at, min(mark.marked_at, self._confirmed_at)) <= ACK_WAIT_S

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
        link.on_disconnect.add(self._forget_unconfirmed)
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
        if not link.connected.is_set():
            return
        now = _now()
        self._note_server(link, now)
        with self._lock:
            for subject in [one for one, mark in self._held.items() if now - mark.marked_at > ACK_WAIT_S]:
                del self._held[subject]
                self._lapsed.add(subject)
            due = {subject: mark for subject, mark in self._held.items() if mark.due_at <= now}
        try:
            for subject, mark in due.items():
                await link.send(subject, IN_PROGRESS)
                mark.due_at, mark.marked_at = now + IN_PROGRESS_EVERY_S, now
            if due and (self._asking is None or self._asking.done()):
                self._asking = asyncio.create_task(self._ask(link, next(reversed(due)), now))
        except Disconnected:
            log.debug("connection lost; the others are marked first when the broker is back")

    def _note_server(self, link: NatsLink, now: float) -> None:
        """Let no delivery lapse because the only broker was down."""
        if link.server_id == self._server:
            return
        if self._server and not link.clustered:
            with self._lock:
                for mark in self._held.values():
                    mark.is_certain = mark.is_certain and now - mark.marked_at <= ACK_WAIT_S
                    mark.marked_at = now
        self._server = link.server_id

    def _forget_unconfirmed(self) -> None:
        """Take back the marks that may not have arrived before the connection was lost."""
        with self._lock:
            for mark in self._held.values():
                mark.marked_at = min(mark.marked_at, max(self._confirmed_at, mark.received_at))
                mark.due_at = 0.0

    async def _ask(self, link: NatsLink, subject: str, sent_at: float) -> None:
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
            with self._lock:
                if sent_at - self._confirmed_at > ACK_WAIT_S:
                    for mark in self._held.values():  # which should have been confirmed in between, if it is older
                        mark.is_certain = mark.is_certain and sent_at - mark.received_at <= ACK_WAIT_S
                self._confirmed_at = sent_at


def _now() -> float:
    """Return seconds of a clock that also runs while the machine sleeps, where the system has one."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


async def _wait(event: asyncio.Event, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return
