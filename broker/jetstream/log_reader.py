"""Reads a stream in order through an ephemeral consumer, replaced if a message is missing."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, Final

from broker.jetstream.api import EPHEMERAL, StoredEntry, call_api, stream_bounds
from broker.jetstream.delivery import delivery_numbers, stored_ns
from broker.nats.client import Msg
from broker.nats.connection import NatsLink
from broker.nats.nats_errors import ApiError, Disconnected, NoStream

log = logging.getLogger(__name__)

BATCH: Final = 256
# on the wire at once; a server drops a client that takes over 10 s to read them
BATCH_BYTES: Final = 8 << 20
EXPIRES_S: Final = 10.0
HEARTBEAT_S: Final = 2.0
PROTOCOL_BYTES: Final = 4096  # for the subject, which the broker counts with the message
SILENCE_S: Final = 5.0  # without even a heartbeat, after which a pull counts as lost
FORGET_AFTER_S: Final = 60.0
REFUSED_PAUSE_S: Final = 0.5
GOES_ON: Final = ("404", "408")  # the pull has ended, the consumer still exists


async def follow_stream(
    link: NatsLink, stream_name: str, start: Callable[[], Awaitable[dict[str, Any]]]
) -> AsyncGenerator[StoredEntry, None]:
    """Yield stored and new entries in order, until the link is closed.

    Args:
        start: returns where to begin, as fields of a consumer's configuration; called for each new
            consumer.

    Raises:
        NoStream: if the stream does not exist.
    """
    while not link.closed:
        attachment = _Attachment(link, stream_name)
        try:
            await attachment.open(await start())
            async with aclosing(attachment.entries()) as entries:
                async for entry in entries:
                    yield entry
        except Disconnected:
            if link.closed:
                return
        except NoStream:
            raise
        # for example from a broker that has just restarted; a reader can only wait
        except ApiError as error:
            log.warning("%s: the broker refuses to have it read: %s; retrying", stream_name, error)
            await asyncio.sleep(REFUSED_PAUSE_S)
        finally:
            await attachment.close()


class _Attachment:
    """One ephemeral consumer with its inbox; ends at the first sign of a missing message."""

    def __init__(self, link: NatsLink, stream_name: str) -> None:
        self._link = link
        self._stream_name = stream_name
        self._queue: asyncio.Queue[Msg | None] = asyncio.Queue()
        self._inbox = f"{link.inbox}.{link.next_token()}"
        self._consumer = ""
        # stream sequence up to which messages have arrived, or can no longer arrive
        self._newest = 0
        self._pending = 0  # messages that the consumer had to deliver when it was created
        self._close: Callable[[], Awaitable[None]] | None = None

    async def open(self, start: dict[str, Any]) -> None:
        self._link.on_disconnect.add(self._lost)
        subscribed = await self._link.subscribe(f"{self._inbox}.*", self._queue.put)
        self._close = subscribed.close
        config = (
            EPHEMERAL
            | {"max_ack_pending": -1, "inactive_threshold": int(FORGET_AFTER_S * 1e9)}
            | start
        )
        if (first := start.get("opt_start_seq")) is not None:
            self._newest = first - 1
        else:  # before the consumer is created: it delivers what is stored in between
            self._newest = (await stream_bounds(self._link, self._stream_name))[1]
        body = {"stream_name": self._stream_name, "config": config}
        answer = await call_api(self._link, f"CONSUMER.CREATE.{self._stream_name}", body)
        self._consumer = str(answer["name"])
        self._pending = int(answer.get("num_pending", 0))

    async def close(self) -> None:
        self._link.on_disconnect.discard(self._lost)
        if self._close is not None:
            await self._close()
        if self._consumer and self._link.connected.is_set():
            try:
                await self._link.send(
                    f"$JS.API.CONSUMER.DELETE.{self._stream_name}.{self._consumer}", b""
                )
            except Disconnected:
                log.debug("not connected; the broker removes the consumer when it expires")

    def _lost(self) -> None:
        self._queue.put_nowait(None)

    async def entries(self) -> AsyncGenerator[StoredEntry, None]:
        pull = 0
        num_due = 0
        delivered = 0
        delivered_before = -1
        while True:
            if not num_due:
                if delivered == delivered_before and await self._overlooked(delivered):
                    return
                pull = pull + 1
                num_due = BATCH
                delivered_before = delivered
                await self._ask(pull)
            message = await self._next()
            if message is None:
                return
            if message.headers and not message.reply and (status := message.headers.get("Status")):
                if status == "100" or not message.subject.endswith(f".{pull}"):
                    continue
                if status not in GOES_ON and "Bytes" not in message.headers.get("Description", ""):
                    log.debug("%s: consumer gone: %s", self._stream_name, message.headers)
                    await asyncio.sleep(0.1)
                    return
                num_due = 0
                continue
            _, seq, consumer_seq = delivery_numbers(message.reply)
            if consumer_seq != delivered + 1:
                log.warning("%s: a message was lost on the way; reading again", self._stream_name)
                return
            delivered = consumer_seq
            num_due = num_due - 1
            self._newest = max(seq, self._newest)
            stored_at_ns = stored_ns(message.reply)
            yield StoredEntry(
                seq, message.subject, message.headers, message.data, stored_ns=stored_at_ns
            )

    async def _overlooked(self, delivered: int) -> bool:
        """Return whether the stream has more than an empty pull of this consumer delivered.

        After a partition, a consumer may send heartbeats from a replica that no longer learns of
        new messages. A consumer of some subjects is replaced needlessly when others grow; it then
        reads its last values once more.
        """
        last = (await stream_bounds(self._link, self._stream_name))[1]
        newest_received = self._newest
        self._newest = max(last, self._newest)
        if last > newest_received:
            log.info(
                "%s: ends at %d, the newest received is %d; reading again",
                self._stream_name,
                last,
                newest_received,
            )
        return last > newest_received or delivered < self._pending

    async def _ask(self, pull: int) -> None:
        most = max(BATCH_BYTES, self._link.max_payload + PROTOCOL_BYTES)  # fits the largest message
        expires = int(EXPIRES_S * 1e9)
        heartbeat = int(HEARTBEAT_S * 1e9)
        request = {
            "batch": BATCH,
            "max_bytes": most,
            "expires": expires,
            "idle_heartbeat": heartbeat,
        }
        subject = f"$JS.API.CONSUMER.MSG.NEXT.{self._stream_name}.{self._consumer}"
        await self._link.send(subject, json.dumps(request).encode(), reply=f"{self._inbox}.{pull}")

    async def _next(self) -> Msg | None:
        """Return the next message, or None if the connection is lost, or none arrives and none is
        on the wire.
        """
        if not self._queue.empty():
            return self._queue.get_nowait()
        coming = asyncio.ensure_future(self._queue.get())
        silent: asyncio.Future[None] | None = None
        try:
            if (await asyncio.wait([coming], timeout=SILENCE_S))[0]:
                return coming.result()
            silent = asyncio.ensure_future(self._link.overdue(SILENCE_S))
            await asyncio.wait([coming, silent], return_when=asyncio.FIRST_COMPLETED)
            if coming.done():
                return coming.result()
        finally:
            coming.cancel()
            if silent is not None:
                silent.cancel()
        log.warning(
            "%s: no sign of life from the broker for %g s; reading again",
            self._stream_name,
            SILENCE_S,
        )
        return None
