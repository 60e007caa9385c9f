"""Work queues: fetch what is there, and hand back what nobody waits for any more."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import deque
from collections.abc import Coroutine
from typing import Any, Final

from broker.answers import Disconnected
from broker.api import ask
from broker.delivery import Delivery, nak_payload
from broker.link import PAUSE_S, Link
from broker.marks import Marks
from broker.natspy import Msg
from broker.streams import ACK_WAIT_S, Stream
from broker.subscribed import Subscribed

log = logging.getLogger(__name__)

LONGEST_PULL_S: Final = 30.0
SHORTEST_PULL_S: Final = 0.05  # below, a pull takes what is there and does not wait at all
GRACE_S: Final = 1.0  # beyond a pull's own expiry, before it counts as lost
QUIET_S: Final = 0.25  # after a message, before a pull counts as over: 2.9 does not always say that it expired half served
MAX_WAITING_PULLS: Final = 8192  # hubs that may wait at one queue


class WorkQueue:
    """The one durable consumer of a work-queue subject, shared by everyone who fetches from it."""

    def __init__(self, link: Link, marks: Marks, stream: Stream, run: str, key: str) -> None:
        self._link, self._marks, self._types = link, marks, stream.messages
        self._stream_name, self._consumer, self._filter = stream.stream_name(run), key, stream.subject(run, key)
        self._inbox = ""
        self._subscribed: Subscribed | None = None  # to the inbox; None before the first pull, and after one was given up
        self._fetching = asyncio.Lock()
        self._pull = 0  # number of the current pull
        self._wanted = 0  # messages the current pull still waits for, 0 when there is none
        self._arrived: deque[Msg] = deque()
        self._ended = ""  # status that ended the current pull
        self._changed = asyncio.Event()
        self._background: set[asyncio.Task[None]] = set()
        self._ensuring: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Create the consumer if need be and listen."""
        self._marks.start()
        await self._ensure()
        self._link.on_disconnect.add(self._on_disconnect)

    async def close(self) -> None:
        """Stop listening; deliveries in hand stay ours."""
        self._link.on_disconnect.discard(self._on_disconnect)
        if self._ensuring is not None:
            self._ensuring.cancel()
        if self._subscribed is not None:
            await self._subscribed.close()

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
            while True:
                left_s = deadline - loop.time()
                if messages := await self._pull_once(limit, max(left_s, 0.0)):
                    return [Delivery(self._link, self._marks, self._types, message) for message in messages]
                if deadline - loop.time() <= 0:
                    return []

    async def _pull_once(self, limit: int, left_s: float) -> list[Msg]:
        if not await _wait(self._link.connected, left_s):
            return []
        await self._link.ready()
        if self._subscribed is None:
            self._inbox = f"{self._link.inbox}.{self._link.next_token()}"
            self._subscribed = await self._link.subscribe(f"{self._inbox}.*", self._on_message)
        expires_s = min(left_s, LONGEST_PULL_S) if left_s >= SHORTEST_PULL_S else 0.0
        self._pull += 1
        self._wanted, self._ended = limit, ""
        # no_wait with an expiry is one-shot: the broker waits for a first message and then sends only what is there, so
        # that no request stays behind to claim messages for someone who has stopped asking.
        request = {"batch": limit, "no_wait": True} | ({"expires": int(expires_s * 1e9)} if expires_s else {})
        try:
            await self._link.send(
                f"$JS.API.CONSUMER.MSG.NEXT.{self._stream_name}.{self._consumer}",
                json.dumps(request).encode(),
                reply=f"{self._inbox}.{self._pull}",
            )
            await self._until_served(expires_s + GRACE_S)
        except Disconnected:
            await asyncio.sleep(PAUSE_S)
            return self._take()
        except BaseException:
            self._give_up_pull()
            raise
        finally:
            self._wanted = 0
        messages = self._take()
        if not messages:
            await self._recover()
        return messages

    async def _until_served(self, within_s: float) -> None:
        """Until the pull is full, over, or silent for too long."""
        until = asyncio.get_running_loop().time() + within_s
        while self._wanted and not self._ended:
            before = len(self._arrived)
            self._changed.clear()
            patience_s = QUIET_S if before else until - asyncio.get_running_loop().time()
            if not await _wait(self._changed, patience_s) and len(self._arrived) == before:
                return

    def _take(self) -> list[Msg]:
        messages = list(self._arrived)
        self._arrived.clear()
        return messages

    async def _recover(self) -> None:
        """After a pull that gave nothing: nothing was there, or the consumer is not."""
        if self._ended == "503":
            await self._ensure_beside()
        elif self._ended not in ("408", "disconnected", ""):
            await asyncio.sleep(0.2 if self._ended != "404" else PAUSE_S)

    async def _ensure_beside(self) -> None:
        """Make the consumer should it be gone, but go on asking it meanwhile: it may be back before the cluster can make any."""
        await asyncio.sleep(0.2)
        if self._ensuring is None:
            self._ensuring = asyncio.create_task(self._ensure())
        done, _ = await asyncio.wait([self._ensuring], timeout=0.3)
        if done:
            ensuring, self._ensuring = self._ensuring, None
            await ensuring

    async def _on_message(self, message: Msg) -> None:
        status = message.headers.get("Status") if message.headers and not message.reply else None
        if status is not None:
            if message.subject == f"{self._inbox}.{self._pull}" and status != "100":
                self._ended = status
                self._changed.set()
            return
        if not self._wanted:
            self._hand_back([message])  # of a pull that was given up
            return
        self._marks.hold(message.reply)
        self._arrived.append(message)
        self._wanted -= 1
        if not self._wanted or len(self._arrived) == 1:
            self._changed.set()

    def _on_disconnect(self) -> None:
        self._ended = "disconnected"
        self._changed.set()

    def _give_up_pull(self) -> None:
        """Hand back what arrived, and leave the inbox: the broker drops a pull that nobody listens for any more."""
        self._hand_back(self._take())
        subscribed, self._subscribed = self._subscribed, None
        if subscribed is not None:
            self._beside(subscribed.drain())

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
        config: dict[str, Any] = {
            "durable_name": self._consumer,
            "filter_subject": self._filter,
            "ack_policy": "explicit",
            "ack_wait": int(ACK_WAIT_S * 1e9),
            "deliver_policy": "all",
            "max_ack_pending": -1,  # the default of 1,000 stalls a fleet without a word
            "max_deliver": -1,  # the hub closes a ticket that comes too often; the broker never forgets one
            "max_waiting": MAX_WAITING_PULLS,
        }
        name = self._stream_name
        await ask(self._link, f"CONSUMER.DURABLE.CREATE.{name}.{self._consumer}", {"stream_name": name, "config": config})


async def _wait(event: asyncio.Event, timeout_s: float) -> bool:
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return False
    return True
