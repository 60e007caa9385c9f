"""Work queues: fetch what is there, and hand back what nobody waits for any more."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import deque
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, Final

from broker.contract.sizes import INLINE_BYTES
from broker.contract.streams import Stream
from broker.jetstream.ack_progress import AckProgress
from broker.jetstream.consumers import ensure_consumer, settings
from broker.jetstream.delivery import Delivery, nak_payload
from broker.jetstream.log_reader import PROTOCOL_BYTES
from broker.jetstream.parts import GroupParts
from broker.nats.client import Msg
from broker.nats.connection import PAUSE_S, NatsLink
from broker.nats.nats_errors import Disconnected
from broker.nats.subscription import LinkSubscription

log = logging.getLogger(__name__)

TOO_LARGE: Final = "bytes"  # ended: the next message would have exceeded the pull's bytes

LONGEST_PULL_S: Final = 30.0
SHORTEST_PULL_S: Final = 0.05  # below, a pull takes what is there and does not wait at all
GRACE_S: Final = 1.0  # beyond a pull's own expiry, before it may count as lost
QUIET_S: Final = 0.25  # after a message, before those that have come are returned; the pull stays open for the others
KEPT_S: Final = 3.0  # what came for nobody waits for the next fetch, then for another process
FIRST_PULL_BYTES: Final = 4 << 20
LEAST_PULL_BYTES: Final = INLINE_BYTES + (64 << 10)  # the largest message that our own publishers send here
MOST_PULL_BYTES: Final = 16 << 20
# a pull that is full sooner asks for more bytes next time, one that takes longer for fewer
PULL_TAKES_S: Final = (0.25, 1.0)


@dataclass
class _Pull:
    """A request for messages that the broker has not ended yet.

    Attributes:
        wanted: messages that it may still bring.
        expires_at: event loop time after which the broker ends it.
        came: messages that it has brought.
        began_at: when the first of them came.
        newest_at: when the last of them came.
        ended: the status that ended it.
        lost: finds out whether an end that does not come is lost.
    """

    number: int
    wanted: int
    expires_at: float
    came: int = 0
    began_at: float = 0.0
    newest_at: float = 0.0
    ended: str = ""
    lost: asyncio.Task[None] | None = None


class WorkQueue:
    """The one durable consumer of a work-queue subject, shared by everyone who fetches from it.

    Bytes that are on their way to this process are never handed back: a pull stays open when its messages come slowly,
    and what comes late goes to the next fetch. Messages that nobody fetches within ``KEPT_S`` are handed back.
    """

    def __init__(
        self, link: NatsLink, marks: AckProgress, parts: GroupParts, stream: Stream, run: str, key: str
    ) -> None:
        self._link, self._marks, self._parts, self._types = link, marks, parts, stream.messages
        self._stream_name, self._key, self._filter = stream.stream_name(run), key, stream.subject(run, key)
        self._consumer = key  # its name; another one's where another program made it
        self._inbox = ""
        # to the inbox; None before the first pull, and after one was given up
        self._subscribed: LinkSubscription | None = None
        self._fetching = asyncio.Lock()
        self._number = 0  # of the newest pull
        self._pull: _Pull | None = None
        self._pull_bytes = FIRST_PULL_BYTES
        self._arrived: deque[Msg] = deque()
        self._changed = asyncio.Event()
        self._unfetched: asyncio.TimerHandle | None = None
        self._background: set[asyncio.Task[None]] = set()
        self._ensuring: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Create the consumer if need be and listen."""
        self._marks.start()
        await self._ensure()
        self._link.on_disconnect.add(self._on_disconnect)

    async def close(self) -> None:
        """Stop listening and hand back what was not fetched; deliveries in hand stay ours."""
        self._link.on_disconnect.discard(self._on_disconnect)
        if self._ensuring is not None:
            self._ensuring.cancel()
        self._give_up()

    async def fetch(self, limit: int, timeout_s: float) -> list[Delivery]:
        """Up to ``limit`` messages; an empty list after ``timeout_s``. Survives reconnects.

        Returns as soon as there is one, with whatever else is there. Cancelled, it hands back what had arrived.

        Raises:
            LostState: the queue's stream is gone.
            Disconnected: the bus was closed.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        async with self._fetching:
            if self._unfetched is not None:
                self._unfetched.cancel()
            messages: list[Msg] = []
            try:
                while not (messages := await self._next(limit, deadline)) and loop.time() < deadline:
                    pass
                return [
                    await Delivery.of(self._link, self._marks, self._parts, self._types, message)
                    for message in messages
                ]
            except BaseException:
                self._arrived.extendleft(reversed(messages))
                self._give_up()
                raise
            finally:
                self._unfetched = loop.call_later(KEPT_S, self._hand_back_unfetched)

    async def _next(self, limit: int, deadline: float) -> list[Msg]:
        """What has come, after a wait for the pull that is open or a new one."""
        loop = asyncio.get_running_loop()
        if self._arrived:
            return self._take(limit)
        if not await _wait(self._link.connected, max(deadline - loop.time(), 0.0)):
            return []
        await self._link.ready()
        try:
            pull = self._pull or await self._ask(limit, max(deadline - loop.time(), 0.0))
            await self._until_served(pull, deadline, limit)
        except Disconnected:
            self._pull = None
            await asyncio.sleep(PAUSE_S)
            return self._take(limit)
        if pull.ended or not pull.wanted:
            self._end(pull)
        messages = self._take(limit)
        if not messages:
            await self._recover(pull)
        return messages

    async def _ask(self, limit: int, left_s: float) -> _Pull:
        """Open a pull.

        Raises:
            Disconnected: there is no connection.
        """
        if self._subscribed is None:
            self._inbox = f"{self._link.inbox}.{self._link.next_token()}"
            self._subscribed = await self._link.subscribe(f"{self._inbox}.*", self._on_message)
        expires_s = min(left_s, LONGEST_PULL_S) if left_s >= SHORTEST_PULL_S else 0.0
        self._number += 1
        pull = self._pull = _Pull(self._number, limit, asyncio.get_running_loop().time() + expires_s)
        # no_wait with an expiry is one-shot: the broker waits for a first message and then sends only what is there, so
        # that no request stays behind to claim messages for someone who has stopped asking.
        request: dict[str, Any] = {"batch": limit, "no_wait": True, "max_bytes": self._pull_bytes}
        await self._link.send(
            f"$JS.API.CONSUMER.MSG.NEXT.{self._stream_name}.{self._consumer}",
            json.dumps(request | ({"expires": int(expires_s * 1e9)} if expires_s else {})).encode(),
            reply=f"{self._inbox}.{pull.number}",
        )
        return pull

    async def _until_served(self, pull: _Pull, deadline: float, limit: int) -> None:
        """Until there is enough, the pull is over or lost, messages come slowly, or the deadline has passed."""
        loop = asyncio.get_running_loop()
        while pull.wanted and not pull.ended and len(self._arrived) < limit:
            before = len(self._arrived)
            self._changed.clear()
            until = deadline if pull.lost is not None else min(pull.expires_at, deadline) + GRACE_S
            if (
                await _wait(self._changed, QUIET_S if before else max(until - loop.time(), 0.0))
                or len(self._arrived) > before
            ):
                continue
            if before or pull.lost is not None or loop.time() < pull.expires_at + GRACE_S:
                return
            pull.lost = asyncio.create_task(self._lose(pull))
            deadline = max(deadline, loop.time() + SHORTEST_PULL_S)  # enough, unless the link is slow

    async def _lose(self, pull: _Pull) -> None:
        """End a pull whose end should have come, once it cannot come any more: 2.9 does not always say that one expired
        half served.
        """
        await self._link.overdue(GRACE_S)
        pull.ended = pull.ended or "lost"
        self._changed.set()

    def _end(self, pull: _Pull) -> None:
        """Forget a pull, and learn from it how much to ask for."""
        if pull.lost is not None:
            pull.lost.cancel()
        if self._pull is pull:
            self._pull = None
        if pull.ended == TOO_LARGE and not pull.came:  # a single message: nobody else could ever fetch it either
            self._pull_bytes = max(2 * self._pull_bytes, self._link.max_payload + PROTOCOL_BYTES)
        elif pull.came > 1:
            took_s = pull.newest_at - pull.began_at
            if took_s > PULL_TAKES_S[1]:
                self._pull_bytes = max(self._pull_bytes // 2, LEAST_PULL_BYTES)
            elif took_s < PULL_TAKES_S[0] and pull.ended == TOO_LARGE:
                self._pull_bytes = max(min(self._pull_bytes * 2, MOST_PULL_BYTES), LEAST_PULL_BYTES)

    def _take(self, limit: int) -> list[Msg]:
        return [self._arrived.popleft() for _ in range(min(limit, len(self._arrived)))]

    async def _recover(self, pull: _Pull) -> None:
        """After a pull that gave nothing: nothing was there, or the consumer is not."""
        if pull.ended == "503":
            await self._ensure_beside()
        elif pull.ended not in ("408", "disconnected", "lost", TOO_LARGE, ""):
            await asyncio.sleep(0.2 if pull.ended != "404" else PAUSE_S)

    async def _ensure_beside(self) -> None:
        """Create the consumer if it is gone, and keep requesting from it: it may be back before the cluster can create
        one.
        """
        await asyncio.sleep(0.2)
        if self._ensuring is None:
            self._ensuring = asyncio.create_task(self._ensure())
        done, _ = await asyncio.wait([self._ensuring], timeout=0.3)
        if done:
            ensuring, self._ensuring = self._ensuring, None
            await ensuring

    async def _on_message(self, message: Msg) -> None:
        pull = self._pull
        status = message.headers.get("Status") if message.headers and not message.reply else None
        if status is not None:
            if pull is not None and message.subject == f"{self._inbox}.{pull.number}" and status != "100":
                pull.ended = TOO_LARGE if "Bytes" in (message.headers or {}).get("Description", "") else status
                self._changed.set()
            return
        if self._subscribed is None:
            self._hand_back([message])  # of a pull that was given up
            return
        self._marks.hold(message.reply)
        self._arrived.append(message)
        if pull is not None and pull.wanted:
            pull.newest_at = asyncio.get_running_loop().time()
            pull.began_at = pull.began_at or pull.newest_at
            pull.came, pull.wanted = pull.came + 1, pull.wanted - 1
        self._changed.set()

    def _on_disconnect(self) -> None:
        if self._pull is not None:
            self._pull.ended = "disconnected"
        self._changed.set()

    def _give_up(self) -> None:
        """Hand back what arrived, and leave the inbox: the broker drops a pull that nobody listens for any more."""
        if self._pull is not None:
            self._end(self._pull)
        if self._unfetched is not None:
            self._unfetched.cancel()
        self._hand_back(self._take(len(self._arrived)))
        subscribed, self._subscribed = self._subscribed, None
        if subscribed is not None:
            self._beside(subscribed.drain())

    def _hand_back_unfetched(self) -> None:
        if not self._fetching.locked():
            self._hand_back(self._take(len(self._arrived)))
            if self._pull is not None:  # more may come
                self._unfetched = asyncio.get_running_loop().call_later(KEPT_S, self._hand_back_unfetched)

    def _hand_back(self, messages: list[Msg]) -> None:
        for message in messages:
            self._marks.release(message.reply)
            self._beside(self._hand_back_one(message.reply))

    def _beside(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _hand_back_one(self, ack_subject: str) -> None:
        try:
            await self._link.send(ack_subject, nak_payload(0.0))
        except Disconnected:
            log.debug("not handed back; the broker delivers it again by itself")

    async def _ensure(self) -> None:
        self._consumer = await ensure_consumer(self._link, self._stream_name, settings(self._key, self._filter))


async def _wait(event: asyncio.Event, timeout_s: float) -> bool:
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return False
    return True
