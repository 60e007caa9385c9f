"""Reads the newest message of every subject of a stream once: with a temporary consumer, or one by
one.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from typing import Final

from broker.jetstream.api import EPHEMERAL, StoredEntry, call_api, find_message
from broker.jetstream.delivery import delivery_numbers
from broker.nats.client import Msg
from broker.nats.connection import PAUSE_S, NatsLink
from broker.nats.nats_errors import Disconnected

BATCH: Final = 256
ANSWER_S: Final = 3.0  # without any message, after which a pull counts as lost
FORGET_AFTER_S: Final = 10.0
NO_MORE: Final = ("404", "408")
AT_ONCE: Final = 32  # requests of a process that may have no consumer


async def latest_entries(link: NatsLink, stream_name: str, pattern: str) -> list[StoredEntry]:
    """Return the newest message of each matching subject, in stream order, retrying until the
    broker answers.

    Raises:
        NoStream: if the stream does not exist.
        Disconnected: if the link was closed.
    """
    while True:
        await link.ready()
        with suppress(Disconnected):
            if (entries := await _read_once(link, stream_name, pattern)) is not None:
                return entries
        await asyncio.sleep(PAUSE_S)


async def latest_one_by_one(link: NatsLink, stream_name: str, pattern: str) -> list[StoredEntry]:
    """Return the same as ``latest`` by a request per subject, for roles that may not have a
    consumer.

    Raises:
        NoStream: if the stream does not exist.
    """
    info = await call_api(link, f"STREAM.INFO.{stream_name}", {"subjects_filter": pattern})
    few = asyncio.Semaphore(AT_ONCE)

    async def newest(subject: str) -> StoredEntry | None:
        async with few:
            return await find_message(link, stream_name, last_of=subject)

    entries = await asyncio.gather(*map(newest, info["state"].get("subjects") or ()))
    return sorted((entry for entry in entries if entry is not None), key=lambda entry: entry.seq)


async def _read_once(link: NatsLink, stream_name: str, pattern: str) -> list[StoredEntry] | None:
    """Read the messages once; return None if an answer was lost."""
    config = EPHEMERAL | {"deliver_policy": "last_per_subject", "filter_subject": pattern}
    config["inactive_threshold"] = int(FORGET_AFTER_S * 1e9)
    response = await call_api(
        link, f"CONSUMER.CREATE.{stream_name}", {"stream_name": stream_name, "config": config}
    )
    if not response.get("num_pending"):
        return []
    consumer = str(response["name"])
    entries: list[StoredEntry] = []
    arrived: asyncio.Queue[Msg] = asyncio.Queue()
    inbox = f"{link.inbox}.{link.next_token()}"
    subscribed = await link.subscribe(inbox, arrived.put)
    try:
        while True:
            # no_wait without an expiry: the broker sends what it has and keeps no request
            request = json.dumps({"batch": BATCH, "no_wait": True}).encode()
            await link.send(
                f"$JS.API.CONSUMER.MSG.NEXT.{stream_name}.{consumer}", request, reply=inbox
            )
            for _ in range(BATCH):
                async with asyncio.timeout(ANSWER_S):
                    message = await arrived.get()
                if (
                    message.headers
                    and not message.reply
                    and (status := message.headers.get("Status"))
                ):
                    return entries if status in NO_MORE else None
                _, seq, _ = delivery_numbers(message.reply)
                entries.append(StoredEntry(seq, message.subject, message.headers, message.data))
                if message.reply.endswith(".0"):  # the number of messages still to be delivered
                    return entries
    except TimeoutError:
        return None
    finally:
        await subscribed.close()
        if link.connected.is_set():
            await link.send(f"$JS.API.CONSUMER.DELETE.{stream_name}.{consumer}", b"")
