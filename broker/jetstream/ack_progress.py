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

from broker.contract.streams import marking_period_s
from broker.identity.login import Login
from broker.nats.connection import NatsLink
from broker.nats.nats_errors import Disconnected, NoResponders
from broker.system.recent_warning import forget_warning

log = logging.getLogger(__name__)

IN_PROGRESS: Final = b"+WPI"
CONFIRM_WITHIN_S: Final = 3.0
LOOK_EVERY_S: Final = 0.5  # for due marks, and whether the event loop turns


@dataclass(slots=True)
class _Mark:
    """What is known of a held message; times are seconds of ``_now``."""

    subject: str  # of its newest delivery here
    num_delivered: int
    wait_s: float  # after which the broker delivers it again
    due_at: float  # of the next mark
    marked_at: float  # when the newest mark was sent, or the delivery came
    asked_at: float  # of the newest mark before the one whose confirmation is awaited
    proven_at: float  # of the newest mark that has certainly arrived
    is_certain: bool = True  # whether marks have certainly arrived in time, all the time
    has_lapsed: bool = False


class AckProgress:
    """Marks held messages as in progress, due ones together.

    A message has one mark, however often it was delivered to this process: the broker applies a
    mark to the message, so that of an older delivery would keep the message from others after the
    newest is settled.

    The thread has its own event loop and connection. If the process's event loop does not turn for
    ``hang_after_s()`` seconds, the process counts as dead: marks stop, and other processes get its
    work.

    A delivery that had no mark for as long as the broker waits has lapsed: others may hold its
    message, so it is never marked again. While the broker itself was down or had no leader, it
    served no other process either, so the holder goes on; but the broker may deliver the message
    again, so the holder may no longer decide how it ends.
    """

    def __init__(
        self,
        url: str,
        name: str,
        hang_after_s: Callable[[], float],
        find_login: Callable[[], Login] = Login,
    ) -> None:
        self._url = url
        self._name = name
        self._hang_after_s = hang_after_s
        self._find_login = find_login
        self._held: dict[tuple[str, int], _Mark] = {}  # by stream and sequence
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

    @property
    def num_held(self) -> int:
        """The number of held messages."""
        return len(self._held)

    def hold(self, ack_subject: str, ack_wait_s: float) -> bool:
        """Mark a delivery's message often enough for the ``ack_wait`` of its consumer.

        The first mark comes within a period, to spread deliveries that arrived together. Return
        whether an earlier delivery of the message is held.
        """
        stream, num_delivered, seq = _message_of(ack_subject)
        now = _boot_seconds()
        due_at = now + marking_period_s(ack_wait_s) * random.random()
        with self._lock:
            earlier = self._held.get((stream, seq))
            if earlier is None or earlier.num_delivered <= num_delivered:
                self._held[stream, seq] = _Mark(
                    ack_subject,
                    num_delivered,
                    ack_wait_s,
                    due_at=due_at,
                    marked_at=now,
                    asked_at=now,
                    proven_at=now,
                )
        return earlier is not None

    def release(self, ack_subject: str) -> None:
        """Stop marking a delivery's message, unless it was delivered to this process again."""
        with self._lock:
            if self._newest(ack_subject) is not None:
                stream, _, seq = _message_of(ack_subject)
                del self._held[stream, seq]

    def has_lapsed(self, ack_subject: str) -> bool:
        """Return whether others may hold a delivery's message by now, because its marks stopped for
        too long.
        """
        stream, num_delivered, seq = _message_of(ack_subject)
        with self._lock:
            mark = self._held.get((stream, seq))
            if mark is None or mark.num_delivered > num_delivered:
                return mark is not None  # it was delivered again since
            return mark.has_lapsed or _boot_seconds() - mark.marked_at > mark.wait_s

    def is_proven(self, ack_subject: str) -> bool:
        """Return whether only this process can hold a delivery's message: the broker has confirmed
        a mark in time.
        """
        with self._lock:
            mark = self._newest(ack_subject)
            if mark is None or mark.has_lapsed or not mark.is_certain:
                return False
            return _boot_seconds() - mark.proven_at <= mark.wait_s

    async def close(self) -> None:
        """Stop marking and wait for the thread."""
        if self._beat is not None:
            self._beat.cancel()
        if self._thread is not None:
            self._runner.get_loop().call_soon_threadsafe(self._stop.set)
            await asyncio.to_thread(self._thread.join)
            self._thread = None

    def _newest(self, ack_subject: str) -> _Mark | None:
        """Return the mark of a delivery, None if its message is not held, or was delivered again
        since.
        """
        stream, num_delivered, seq = _message_of(ack_subject)
        mark = self._held.get((stream, seq))
        return mark if mark is not None and mark.num_delivered <= num_delivered else None

    def _turn(self) -> None:
        self._turned = time.monotonic()
        self._beat = asyncio.get_running_loop().call_later(LOOK_EVERY_S, self._turn)

    def _run(self) -> None:
        with self._runner:
            self._runner.run(self._mark_forever())

    async def _mark_forever(self) -> None:
        link = NatsLink(self._url, f"{self._name} marks", self._find_login)
        link.on_disconnect.add(self._forget_unproven)
        opening = asyncio.create_task(link.open())
        hanging = False
        try:
            while not self._stop.is_set():
                await _wait_until_set(self._stop, LOOK_EVERY_S)
                stood_s = time.monotonic() - self._turned
                if (stood_s > self._hang_after_s()) != hanging:
                    hanging = not hanging
                    if hanging:
                        log.error(
                            "event loop blocked for %.1f s; other processes get its work", stood_s
                        )
                    else:
                        log.info("event loop runs again")
                        forget_warning(log)
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
        now = _boot_seconds()
        self._note_server(link, now)
        with self._lock:
            for mark in self._held.values():
                mark.has_lapsed = mark.has_lapsed or now - mark.marked_at > mark.wait_s
            due_marks = [
                mark for mark in self._held.values() if mark.due_at <= now and not mark.has_lapsed
            ]
        may_ask = self._asking is None or self._asking.done()
        try:
            for mark in due_marks:
                if not may_ask or mark is not due_marks[-1]:
                    await link.send(mark.subject, IN_PROGRESS)
                mark.due_at = now + marking_period_s(mark.wait_s)
                mark.marked_at = now
        except Disconnected:
            log.debug("connection lost; the others are marked first when the broker is back")
            return
        if due_marks and may_ask:
            with self._lock:  # the broker reads what a connection sends in order
                for mark in self._held.values():
                    mark.asked_at = mark.marked_at
            self._asking = asyncio.create_task(self._ask(link, due_marks[-1], now))

    def _note_server(self, link: NatsLink, now: float) -> None:
        """Let no delivery lapse because the only broker was down."""
        if link.server_id == self._server:
            return
        if self._server and not link.clustered:
            with self._lock:
                for mark in self._held.values():
                    mark.is_certain = mark.is_certain and now - mark.marked_at <= mark.wait_s
                    mark.marked_at = now
                    # Nothing was sent to this server yet, which the next proof would cover.
                    mark.due_at = 0.0
        self._server = link.server_id

    def _forget_unproven(self) -> None:
        """Take back the marks that may not have arrived before the connection was lost; they are
        sent again first.
        """
        with self._lock:
            for mark in self._held.values():
                if mark.marked_at > mark.proven_at:
                    mark.marked_at = mark.proven_at
                    mark.due_at = 0.0
                mark.asked_at = mark.proven_at

    async def _ask(self, link: NatsLink, mark: _Mark, sent_at: float) -> None:
        """Have one mark confirmed: a server cut off from its cluster accepts marks but does not
        pass them on.
        """
        try:
            await link.call(mark.subject, IN_PROGRESS, timeout_s=CONFIRM_WITHIN_S)
        except Disconnected:
            log.debug("connection lost; the mark is sent again")
        except NoResponders:
            link.doubt("marks")
        except TimeoutError:
            link.doubt("marks", CONFIRM_WITHIN_S)
        else:
            link.trust("marks")
            self._note_proof(sent_at)
            return
        mark.due_at = 0.0  # it may not have arrived

    def _note_proof(self, sent_at: float) -> None:
        """Note that the marks that were sent until then have arrived."""
        with self._lock:
            self._confirmed_at = sent_at
            for mark in self._held.values():
                # it may have been delivered again in between
                if mark.asked_at - mark.proven_at > mark.wait_s:
                    mark.is_certain = False
                mark.proven_at = max(mark.proven_at, mark.asked_at)


def _boot_seconds() -> float:
    """Return the seconds since boot, including sleep where the system counts it."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def _message_of(ack_subject: str) -> tuple[str, int, int]:
    """Return (stream, times delivered, stream sequence) from an acknowledgement subject."""
    tokens = ack_subject.split(".")
    first = 2 if len(tokens) == 9 else 4  # longer with a JetStream domain and account in it
    return tokens[first], int(tokens[first + 2]), int(tokens[first + 3])


async def _wait_until_set(event: asyncio.Event, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return
