"""Key-value buckets: the last value of each key, with compare-and-swap."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, suppress
from functools import partial
from typing import Final

from broker.contract import codec, wire
from broker.contract.streams import Stream, check_token
from broker.errors import ConfigError, WireError
from broker.jetstream.api import StoredEntry, find_message
from broker.jetstream.latest import latest_entries, latest_one_by_one
from broker.jetstream.news import newer_values
from broker.jetstream.publish import EXPECTED_LAST_KEY_SEQ, MESSAGE_ID, store_message
from broker.jetstream.reserve import release_reserve
from broker.nats.client import Msg
from broker.nats.connection import NatsLink
from broker.nats.nats_errors import NoStream
from broker.nats.subscription import LinkSubscription

OPERATION: Final = "KV-Operation"
MARKER_REASON: Final = "Nats-Marker-Reason"

log = logging.getLogger(__name__)

Malformed = Callable[[str, int, str, bytes], Awaitable[None]]
OnPut = Callable[[str, wire.Message | None], None]


class KeyValue:
    """One KV bucket of a run, typed by its row in the table. Keys begin with the run, for example
    ``demo.rollout.r1``.

    A bucket that does not exist reads as empty. In a bucket whose values the run's owner signs, one
    without a valid signature reads as deleted, and so does one that is older than a value that was
    read before.

    Attributes:
        ensure: creates the bucket if it is missing, or waits for the learner to do so; a bucket in
            memory does not survive a restart of the broker.
    """

    def __init__(
        self,
        link: NatsLink,
        stream: Stream,
        run: str,
        malformed: Malformed,
        ensure: Callable[[], Awaitable[None]],
    ) -> None:
        self._link = link
        self._stream = stream
        self._run, self._stream_name, self._prefix = (
            run,
            stream.stream_name(run),
            stream.key_prefix(run),
        )
        self._stamps: dict[str, int] = {}  # of the newest signed value that was read, by key
        # revision of the newest value without a valid signature, by key
        self._refused: dict[str, int] = {}
        self._malformed = malformed
        self.ensure = ensure

    async def get(self, key: str) -> tuple[wire.Message, int] | None:
        """Return message and revision, or None.

        Raises:
            WireError: if the value does not decode.
        """
        entry = await self.get_bytes(key)
        return None if entry is None else (codec.decode(entry[0], *self._stream.messages), entry[1])

    async def get_bytes(self, key: str) -> tuple[bytes, int] | None:
        """Return the encoded value and its revision, or None."""
        try:
            entry = await self._last(key)
        except NoStream:
            return None
        return None if entry is None or entry[2] else entry[:2]

    async def put(self, key: str, message: wire.Message) -> int:
        """Set the value; return its revision."""
        revision = await self._store(key, codec.encode(message), {})
        assert revision is not None
        return revision

    async def create(self, key: str, message: wire.Message) -> int | None:
        """Set the value of a new key; return its revision, or None if the key exists."""
        revision = await self.update(key, message, 0)
        if revision is None:
            entry = await self._last(key)
            if entry is not None and entry[2]:  # a deleted key has a revision, but no value
                return await self.update(key, message, entry[1])
        return revision

    async def update(self, key: str, message: wire.Message, revision: int) -> int | None:
        """Compare and swap; return the new revision, or None if the key is no longer at
        ``revision``.
        """
        return await self._store(key, codec.encode(message), {EXPECTED_LAST_KEY_SEQ: str(revision)})

    async def delete(self, key: str) -> None:
        """Remove the value, if any."""
        await self._store(key, b"", {OPERATION: "DEL"})

    async def values(self, prefix: str) -> dict[str, wire.Message]:
        """Return every key below a prefix of whole parts (``demo.rollout``) that holds a value,
        with the value.
        """
        read = latest_entries if self._link.login.manages else latest_one_by_one
        try:
            entries = await read(self._link, self._stream_name, f"{self._prefix}{prefix}.>")
        except NoStream:
            return {}
        values: dict[str, wire.Message] = {}
        for entry in entries:
            key = entry.subject.removeprefix(self._prefix)
            if _is_deletion(entry.headers):
                continue
            message = await self._decoded(key, entry.seq, entry.data)
            if message is not None:
                values[key] = message
        return values

    async def watch(self, key: str) -> AsyncGenerator[tuple[wire.Message | None, int], None]:
        """Yield (message or None if deleted, revision) of one key, now and after each change, from
        the stream's leader.

        Skips intermediate values and expiries; a value that does not decode becomes a dead letter.
        """
        subject = self._prefix + _check_key(key, self._stream.name)

        async def read() -> tuple[int, int, tuple[bytes, bool]] | None:
            entry = await self._last(key)
            return None if entry is None else (entry[1], entry[3], (entry[0], entry[2]))

        async with aclosing(newer_values(self._link, subject, read)) as values:
            async for revision, (data, is_deletion) in values:
                message = None if is_deletion else await self._decoded(key, revision, data)
                if is_deletion or message is not None:
                    yield message, revision

    async def tap(self, prefix: str, on_put: OnPut) -> LinkSubscription:
        """Call ``on_put`` with (key, message or None if deleted) of every later put below a prefix,
        stored or not.

        For keys that are put repeatedly and never compared and swapped: a missed value comes again.
        """

        async def tap(message: Msg) -> None:
            key = message.subject.removeprefix(self._prefix)
            if _is_deletion(message.headers):
                on_put(key, None)
                return
            try:
                on_put(key, codec.decode(message.data, *self._stream.messages))
            except WireError as error:
                log.warning("%s %s: %s", self._stream.name, key, error)

        return await self._link.subscribe(f"{self._prefix}{prefix}.>", tap)

    async def _decoded(self, key: str, seq: int, data: bytes) -> wire.Message | None:
        try:
            return codec.decode(data, *self._stream.messages)
        except WireError as error:
            await self._malformed(key, seq, str(error), data)
            return None

    async def _store(self, key: str, data: bytes, headers: dict[str, str]) -> int | None:
        headers[MESSAGE_ID] = f"{self._link.inbox}.{self._link.next_token()}"
        make_room = (
            partial(release_reserve, self._link, key.partition(".")[0])
            if self._stream.essential
            else None
        )
        subject = self._prefix + _check_key(key, self._stream.name)
        if self._stream.signed:
            with suppress(NoStream):
                # so that the new value is the newest, even if the clocks of its writers differ
                await self._last(key)
            headers |= self._link.login.sign(
                self._run, subject, data, above=self._stamps.get(key, 0)
            )
        revision = await store_message(
            self._link,
            self._stream_name,
            subject,
            data=data,
            headers=headers,
            make_room=make_room,
        )
        if self._stream.signed and revision is not None:
            self._stamps[key] = self._link.login.stamp(self._run, subject, headers, data)
        return revision

    async def _last(self, key: str) -> tuple[bytes, int, bool, int] | None:
        """Return the key's newest entry, from the stream's leader.

        Returns:
            (value, revision, whether it is a deletion, unix time in ns at which it was stored)
        """
        subject = self._prefix + _check_key(key, self._stream.name)
        entry = await find_message(self._link, self._stream_name, last_of=subject)
        if entry is None:
            return None
        is_deletion = _is_deletion(entry.headers) or not self._is_valid(key, entry)
        return entry.data, entry.seq, is_deletion, entry.stored_ns

    def _is_valid(self, key: str, entry: StoredEntry) -> bool:
        """Return whether the run's owner signed an entry, as its newest so far; always true for
        unsigned buckets.
        """
        if not self._stream.signed:
            return True
        try:
            stamp = self._link.login.stamp(self._run, entry.subject, entry.headers, entry.data)
            if stamp < self._stamps.get(key, 0):
                raise WireError("it is older than one that was read before")
        except WireError as error:
            if self._refused.get(key) != entry.seq:
                log.warning(
                    "%s %s: ignoring value %d: %s", self._stream.name, key, entry.seq, error
                )
            self._refused[key] = entry.seq
            return False
        self._stamps[key] = stamp
        return True


def _check_key(key: str, setting: str) -> str:
    if not key:
        raise ConfigError(setting, key, "a key must not be empty")
    for part in key.split("."):
        check_token(part, setting)
    return key


def _is_deletion(headers: dict[str, str] | None) -> bool:
    return headers is not None and (
        headers.get(OPERATION) in ("DEL", "PURGE") or MARKER_REASON in headers
    )
