"""Fetches messages from a work queue and hands back those that are no longer wanted."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import deque
from collections.abc import Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from broker.contract.sizes import INLINE_BYTES
from broker.contract.streams import ACK_WAIT_S, Stream
from broker.jetstream.ack_progress import AckProgress
from broker.jetstream.consumers import consumer_settings, ensure_consumer
from broker.jetstream.delivery import Delivery, delivery_numbers, nak_payload
from broker.jetstream.log_reader import PROTOCOL_BYTES
from broker.jetstream.parts import GroupParts
from broker.jetstream.stream_counts import StreamCounts
from broker.nats.client import Msg
from broker.nats.connection import PAUSE_S, NatsLink
from broker.nats.nats_errors import Disconnected
from broker.nats.subscription import LinkSubscription

log = logging.getLogger(__name__)

TOO_LARGE: Final = (
    "bytes"  # value of end_status: the next message would have exceeded the pull's bytes
)

LONGEST_PULL_S: Final = 30.0
SHORTEST_PULL_S: Final = 0.05  # a shorter pull takes what is stored and does not wait
GRACE_S: Final = 1.0  # beyond a pull's expiry, before it may count as lost
# after a message, before received ones are returned; the pull stays open for the others
QUIET_S: Final = 0.25
KEPT_S: Final = 3.0  # that unfetched messages wait for the next fetch before they are handed back
FIRST_PULL_BYTES: Final = 4 << 20
# the largest message that the project publishes here
LEAST_PULL_BYTES: Final = INLINE_BYTES + (64 << 10)
MOST_PULL_BYTES: Final = 16 << 20
# the next pull requests more bytes if one fills sooner, fewer if it takes longer
PULL_TAKES_S: Final = (0.25, 1.0)


@dataclass
class _Pull:
    """A request for messages that the broker has not ended yet; times are of the event loop."""

    number: int
    num_expected: int  # messages that may still arrive
    expires_at: float  # when the broker ends it
    came: int = 0  # messages that have arrived
    began_at: float = 0.0  # when the first arrived
    newest_at: float = 0.0  # when the latest arrived
    end_status: str = ""  # the status that ended it
    loss_check: asyncio.Task[None] | None = None  # finds out whether an overdue end is lost


class WorkQueue:
    """The durable consumer of a work-queue subject, shared by all processes that fetch from it.

    Bytes on their way to this process are never handed back: a pull stays open while its messages
    arrive slowly, and late ones go to the next fetch. Messages not fetched within ``KEPT_S`` are
    handed back.
    """

    def __init__(
        self,
        link: NatsLink,
        marks: AckProgress,
        parts: GroupParts,
        counts: StreamCounts,
        stream: Stream,
        run: str,
        key: str,
    ) -> None:
        self._link = link
        self._marks = marks
        self._parts = parts
        self._types = stream.messages
        self._counts = counts
        self._stream = stream.name
        self._stream_name, self._key, self._filter = (
            stream.stream_name(run),
            key,
            stream.all_subjects(run, key),
        )
        self._consumer = key  # its name, unless another program created it
        self._ack_wait_s = ACK_WAIT_S
        self._inbox = ""
        # to the inbox; None before the first pull and after giving up
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
        """Create the consumer if it is missing, and start listening."""
        self._marks.start()
        await self._ensure()
        self._link.on_disconnect.add(self._on_disconnect)

    async def renew(self) -> None:
        """Follow the consumer's settings, which the learner may have changed."""
        await self._ensure()

    async def close(self) -> None:
        """Stop listening and hand back unfetched messages; deliveries already returned are still
        held.
        """
        self._link.on_disconnect.discard(self._on_disconnect)
        if self._ensuring is not None:
            self._ensuring.cancel()
        self._give_up()

    async def fetch(self, limit: int, timeout_s: float) -> list[Delivery]:
        """Return up to ``limit`` messages as soon as there is one, or none after ``timeout_s``,
        across reconnects.

        When cancelled, hands back what had arrived.

        Raises:
            LostState: if the queue's stream does not exist.
            Disconnected: if the bus was closed.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        async with self._fetching:
            if self._unfetched is not None:
                self._unfetched.cancel()
            messages: list[Msg] = []
            try:
                while (
                    not (messages := await self._next(limit, deadline)) and loop.time() < deadline
                ):
                    pass
                decode = partial(
                    Delivery.of,
                    self._link,
                    self._marks,
                    self._parts,
                    types=self._types,
                    settled=self._settled,
                )
                deliveries = [await decode(message=message) for message in messages]
                self._counts.consumed[self._stream] += len(deliveries)
                self._counts.redelivered[self._stream] += sum(
                    delivery.num_delivered > 1 for delivery in deliveries
                )
                return deliveries
            except BaseException:
                self._arrived.extendleft(reversed(messages))
                self._give_up()
                raise
            finally:
                self._unfetched = loop.call_later(KEPT_S, self._hand_back_unfetched)

    def _settled(self, is_acknowledged: bool) -> None:
        counts = self._counts.acknowledged if is_acknowledged else self._counts.handed_back
        counts[self._stream] += 1

    async def _next(self, limit: int, deadline: float) -> list[Msg]:
        """Return received messages, after waiting for the open pull or a new one."""
        loop = asyncio.get_running_loop()
        if self._arrived:
            return self._take(limit)
        if not await _wait_until_set(self._link.connected, max(deadline - loop.time(), 0.0)):
            return []
        await self._link.ready()
        try:
            pull = self._pull or await self._ask(limit, max(deadline - loop.time(), 0.0))
            await self._until_served(pull, deadline, limit)
        except Disconnected:
            self._pull = None
            await asyncio.sleep(PAUSE_S)
            return self._take(limit)
        if pull.end_status or not pull.num_expected:
            self._end(pull)
        messages = self._take(limit)
        if not messages:
            await self._recover(pull)
        return messages

    async def _ask(self, limit: int, left_s: float) -> _Pull:
        """Open a pull."""
        if self._subscribed is None:
            self._inbox = f"{self._link.inbox}.{self._link.next_token()}"
            self._subscribed = await self._link.subscribe(f"{self._inbox}.*", self._on_message)
        expires_s = min(left_s, LONGEST_PULL_S) if left_s >= SHORTEST_PULL_S else 0.0
        self._number += 1
        pull = self._pull = _Pull(
            self._number, limit, asyncio.get_running_loop().time() + expires_s
        )
        # no_wait with an expiry is one-shot: the broker waits for a first message and then sends
        # only what it has, so that no request remains that would claim messages for a process that
        # has stopped fetching
        request: dict[str, Any] = {"batch": limit, "no_wait": True, "max_bytes": self._pull_bytes}
        if expires_s:
            request["expires"] = int(expires_s * 1e9)
        subject = f"$JS.API.CONSUMER.MSG.NEXT.{self._stream_name}.{self._consumer}"
        await self._link.send(
            subject, json.dumps(request).encode(), reply=f"{self._inbox}.{pull.number}"
        )
        return pull

    async def _until_served(self, pull: _Pull, deadline: float, limit: int) -> None:
        """Wait until enough messages arrived, the pull ended or is lost, messages are slow, or the
        deadline passed.
        """
        loop = asyncio.get_running_loop()
        while pull.num_expected and not pull.end_status and len(self._arrived) < limit:
            num_arrived = len(self._arrived)
            self._changed.clear()
            until = (
                deadline
                if pull.loss_check is not None
                else min(pull.expires_at, deadline) + GRACE_S
            )
            wait_s = QUIET_S if num_arrived else max(until - loop.time(), 0.0)
            if await _wait_until_set(self._changed, wait_s) or len(self._arrived) > num_arrived:
                continue
            if (
                num_arrived
                or pull.loss_check is not None
                or loop.time() < pull.expires_at + GRACE_S
            ):
                return
            pull.loss_check = asyncio.create_task(self._lose(pull))
            # enough, unless the link is slow
            deadline = max(deadline, loop.time() + SHORTEST_PULL_S)

    async def _lose(self, pull: _Pull) -> None:
        """End an overdue pull once its end can no longer arrive: nats-server 2.9 does not always
        report an expiry.
        """
        await self._link.overdue(GRACE_S)
        pull.end_status = pull.end_status or "lost"
        self._changed.set()

    def _end(self, pull: _Pull) -> None:
        """Forget a pull and adapt the bytes to request next."""
        if pull.loss_check is not None:
            pull.loss_check.cancel()
        if self._pull is pull:
            self._pull = None
        # a single message that no other pull could fetch either
        if pull.end_status == TOO_LARGE and not pull.came:
            self._pull_bytes = max(2 * self._pull_bytes, self._link.max_payload + PROTOCOL_BYTES)
        elif pull.came > 1:
            took_s = pull.newest_at - pull.began_at
            if took_s > PULL_TAKES_S[1]:
                self._pull_bytes = max(self._pull_bytes // 2, LEAST_PULL_BYTES)
            elif took_s < PULL_TAKES_S[0] and pull.end_status == TOO_LARGE:
                self._pull_bytes = max(min(self._pull_bytes * 2, MOST_PULL_BYTES), LEAST_PULL_BYTES)

    def _take(self, limit: int) -> list[Msg]:
        return [self._arrived.popleft() for _ in range(min(limit, len(self._arrived)))]

    async def _recover(self, pull: _Pull) -> None:
        """Pause after an empty pull, or create the consumer if it is missing."""
        if pull.end_status == "503":
            await self._ensure_while_pulling()
        elif pull.end_status not in ("408", "disconnected", "lost", TOO_LARGE, ""):
            await asyncio.sleep(0.2 if pull.end_status != "404" else PAUSE_S)

    async def _ensure_while_pulling(self) -> None:
        """Create the consumer while pulls continue: it may be back before the cluster can create
        one.
        """
        await asyncio.sleep(0.2)
        if self._ensuring is None:
            self._ensuring = asyncio.create_task(self._ensure())
        finished, _ = await asyncio.wait([self._ensuring], timeout=0.3)
        if finished:
            ensuring = self._ensuring
            self._ensuring = None
            await ensuring

    async def _on_message(self, message: Msg) -> None:
        pull = self._pull
        status = message.headers.get("Status") if message.headers and not message.reply else None
        if status is not None:
            if (
                pull is not None
                and message.subject == f"{self._inbox}.{pull.number}"
                and status != "100"
            ):
                description = (message.headers or {}).get("Description", "")
                pull.end_status = TOO_LARGE if "Bytes" in description else status
                self._changed.set()
            return
        if self._subscribed is None:
            self._hand_back([message])  # of an abandoned pull
            return
        if self._marks.hold(message.reply, self._ack_wait_s):
            self._drop_older(message)
        self._arrived.append(message)
        if pull is not None and pull.num_expected:
            pull.newest_at = asyncio.get_running_loop().time()
            pull.began_at = pull.began_at or pull.newest_at
            pull.came = pull.came + 1
            pull.num_expected = pull.num_expected - 1
        self._changed.set()

    def _drop_older(self, message: Msg) -> None:
        """Drop earlier deliveries of a message that nobody has fetched, so that it is not handed
        back twice.
        """
        seq = delivery_numbers(message.reply)[1]
        for older in [
            earlier for earlier in self._arrived if delivery_numbers(earlier.reply)[1] == seq
        ]:
            self._arrived.remove(older)

    def _on_disconnect(self) -> None:
        if self._pull is not None:
            self._pull.end_status = "disconnected"
        self._changed.set()

    def _give_up(self) -> None:
        """Hand back messages and unsubscribe: the broker drops a pull without a listener."""
        if self._pull is not None:
            self._end(self._pull)
        if self._unfetched is not None:
            self._unfetched.cancel()
        self._hand_back(self._take(len(self._arrived)))
        subscribed = self._subscribed
        self._subscribed = None
        if subscribed is not None:
            self._run_in_background(subscribed.drain())

    def _hand_back_unfetched(self) -> None:
        if not self._fetching.locked():
            self._hand_back(self._take(len(self._arrived)))
            if self._pull is not None:  # more may arrive
                self._unfetched = asyncio.get_running_loop().call_later(
                    KEPT_S, self._hand_back_unfetched
                )

    def _hand_back(self, messages: list[Msg]) -> None:
        for message in messages:
            is_ours = self._marks.is_proven(message.reply) or self._subscribed is None
            self._marks.release(message.reply)
            if is_ours:  # else another process may hold it, which would lose it
                self._run_in_background(self._hand_back_one(message.reply))

    def _run_in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _hand_back_one(self, ack_subject: str) -> None:
        try:
            await self._link.send(ack_subject, nak_payload(0.0))
        except Disconnected:
            log.debug("not connected; the broker delivers the message again when its wait ends")

    async def _ensure(self) -> None:
        config = consumer_settings(self._key, self._filter)
        self._consumer, self._ack_wait_s = await ensure_consumer(
            self._link, self._stream_name, config
        )


async def _wait_until_set(event: asyncio.Event, timeout_s: float) -> bool:
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return False
    return True
