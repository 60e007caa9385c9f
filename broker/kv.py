"""Key-value buckets: the last value of each key, with compare-and-swap."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from functools import partial
from typing import Any, Final

from broker import wire
from broker.api import ask, find
from broker.errors import ConfigError, WireError
from broker.link import Link
from broker.reader import follow
from broker.reserve import release
from broker.store import EXPECTED_LAST_KEY_SEQ, MESSAGE_ID, store
from broker.streams import Stream, token

OPERATION: Final = "KV-Operation"
MARKER_REASON: Final = "Nats-Marker-Reason"

log = logging.getLogger(__name__)

Malformed = Callable[[str, int, str, bytes], Awaitable[None]]


class KeyValue:
    """One KV bucket, typed by its row in the table. Keys are full keys, for example ``demo.rollout.r1``."""

    def __init__(self, link: Link, stream: Stream, bucket: str, malformed: Malformed) -> None:
        self._link, self._stream = link, stream
        self._stream_name, self._prefix = kv_stream_name(bucket), kv_prefix(bucket)
        self._malformed = malformed

    async def get(self, key: str) -> tuple[wire.Message, int] | None:
        """Message and revision, or None.

        Raises:
            WireError: what is there does not decode.
        """
        found = await self.get_bytes(key)
        return None if found is None else (wire.decode(found[0], *self._stream.messages), found[1])

    async def get_bytes(self, key: str) -> tuple[bytes, int] | None:
        """The value as it stands there and its revision, or None."""
        found = await self._last(key)
        if found is None or found[2]:
            return None
        return found[0], found[1]

    async def put(self, key: str, message: wire.Message) -> int:
        """Set the value; its revision."""
        revision = await self._store(key, wire.encode(message), {})
        assert revision is not None
        return revision

    async def create(self, key: str, message: wire.Message) -> int | None:
        """The revision, or None when the key exists."""
        revision = await self.update(key, message, 0)
        if revision is None:
            found = await self._last(key)
            if found is not None and found[2]:  # a deleted key has a revision, but no value
                return await self.update(key, message, found[1])
        return revision

    async def update(self, key: str, message: wire.Message, revision: int) -> int | None:
        """Compare-and-swap: the new revision, or None when the key moved on."""
        return await self._store(key, wire.encode(message), {EXPECTED_LAST_KEY_SEQ: str(revision)})

    async def delete(self, key: str) -> None:
        """Remove the value; does nothing when there is none."""
        await self._store(key, b"", {OPERATION: "DEL"})

    async def keys(self) -> list[str]:
        """Every key that holds a value, sorted."""
        info = await ask(self._link, f"STREAM.INFO.{self._stream_name}", {"subjects_filter": f"{self._prefix}>"})
        names = [subject.removeprefix(self._prefix) for subject in (info["state"].get("subjects") or {})]
        return sorted([name for name in names if await self.get_bytes(name) is not None])

    async def watch(self, prefix: str) -> AsyncGenerator[tuple[str, wire.Message | None, int], None]:
        """(key, message or None when deleted, revision) of every key with the prefix, now and from now on.

        Intermediate values may be skipped; an expired key gives no event. What does not decode goes to the dead letters.
        """
        parent = prefix.rpartition(".")[0]
        pattern = f"{self._prefix}{parent}.>" if parent else f"{self._prefix}>"
        seen: dict[str, int] = {}
        async with aclosing(follow(self._link, self._stream_name, _last_of_each(pattern))) as entries:
            async for entry in entries:
                key = entry.subject.removeprefix(self._prefix)
                if not key.startswith(prefix) or seen.get(key) == entry.seq:
                    continue
                seen[key] = entry.seq
                if _is_deletion(entry.headers):
                    yield key, None, entry.seq
                    continue
                try:
                    message = wire.decode(entry.data, *self._stream.messages)
                except WireError as error:
                    await self._malformed(key, entry.seq, str(error), entry.data)
                    continue
                yield key, message, entry.seq

    async def _store(self, key: str, data: bytes, headers: dict[str, str]) -> int | None:
        headers[MESSAGE_ID] = f"{self._link.inbox}.{self._link.next_token()}"
        make_room = partial(release, self._link, key.partition(".")[0]) if self._stream.essential else None
        return await store(self._link, self._stream_name, self._prefix + _checked(key, self._stream.name), data, headers, make_room)

    async def _last(self, key: str) -> tuple[bytes, int, bool] | None:
        """(value, revision, whether it is a deletion) of the key's newest entry, from the stream's leader."""
        subject = self._prefix + _checked(key, self._stream.name)
        found = await find(self._link, self._stream_name, last_of=subject)
        return None if found is None else (found.data, found.seq, _is_deletion(found.headers))


def kv_stream_name(bucket: str) -> str:
    """JetStream's name of the stream behind a bucket."""
    return f"KV_{bucket}"


def kv_prefix(bucket: str) -> str:
    """What stands before a key in the subjects of a bucket."""
    return f"$KV.{bucket}."


def _checked(key: str, what: str) -> str:
    if not key:
        raise ConfigError(what, key, "a key must not be empty")
    for part in key.split("."):
        token(part, what)
    return key


def _is_deletion(headers: dict[str, str] | None) -> bool:
    return headers is not None and (headers.get(OPERATION) in ("DEL", "PURGE") or MARKER_REASON in headers)


def _last_of_each(pattern: str) -> Callable[[], Awaitable[dict[str, Any]]]:
    async def start() -> dict[str, Any]:
        return {"deliver_policy": "last_per_subject", "filter_subject": pattern}

    return start
