"""The durable side: publish, fetch, acknowledge, read a log, last values, key-value. At-least-once, never less."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from broker import wire
from broker.streams import Stream

M = TypeVar("M", bound=wire.Message)


@dataclass(frozen=True)
class LogRecord:
    """One entry of a log; exactly one of ``message`` and ``error`` is set."""

    seq: int
    message: wire.Message | None
    error: str  # why it did not decode
    ticket: int  # from the TICKET_HEADER, 0 if absent
    data: bytes


class Delivery:
    """One message of a work queue, ours until acknowledged; in-progress marks are sent for it meanwhile.

    The marks come from a thread with a connection of its own, so that a busy event loop cannot starve them; they stop
    when the event loop has not turned for ``Bus.hang_after_s``.
    """

    message: wire.Message | None  # None when it did not decode
    error: str
    ticket: int
    seq: int
    num_delivered: int
    data: bytes

    async def ack(self) -> None:
        """Done for good; confirmed by the broker."""
        raise NotImplementedError

    async def nak(self, delay_s: float = 0.0) -> None:
        """Hand back for someone else, after a delay."""
        raise NotImplementedError


class WorkQueue:
    """The one durable consumer of a work-queue subject, shared by everyone who fetches from it."""

    async def fetch(self, limit: int, timeout_s: float) -> list[Delivery]:
        """Up to ``limit`` messages; an empty list after ``timeout_s``. Survives reconnects."""
        raise NotImplementedError


class KeyValue:
    """One KV bucket, typed by its row in the table. Keys are full keys, for example ``demo.rollout.r1``."""

    async def get(self, key: str) -> tuple[wire.Message, int] | None:
        """Message and revision, or None."""
        raise NotImplementedError

    async def put(self, key: str, message: wire.Message) -> int: ...
    async def create(self, key: str, message: wire.Message) -> int | None:
        """The revision, or None when the key exists."""
        raise NotImplementedError

    async def update(self, key: str, message: wire.Message, revision: int) -> int | None:
        """Compare-and-swap: the new revision, or None when the key moved on."""
        raise NotImplementedError

    async def delete(self, key: str) -> None: ...
    def watch(self, prefix: str) -> AsyncIterator[tuple[str, wire.Message | None, int]]:
        """(key, message or None when deleted, revision) of every key with the prefix, now and from now on."""
        raise NotImplementedError


class Bus:
    """One process's connection to the broker, for one run. Reconnects for ever; publishes wait while disconnected."""

    run: str
    hang_after_s: float = 30.0

    @classmethod
    async def connect(cls, url: str, run: str, *, name: str, deadline_s: float | None = None) -> Bus:
        """Keep trying and say so every few seconds.

        Raises:
            BrokerUnreachable: no answer within ``deadline_s`` (None: for ever).
        """
        raise NotImplementedError

    async def close(self) -> None: ...
    async def ensure_streams(self) -> None:
        """Create this run's streams and buckets; does nothing for those that exist."""

    async def publish(
        self,
        stream: Stream,
        message: wire.Message,
        *,
        key: str = "",
        ticket: int = 0,
        message_id: str = "",
        expected_last_seq: int | None = None,
    ) -> int | None:
        """Store one message and return its sequence once the broker has confirmed it; retried until it has.

        ``message_id`` lets the broker drop a repetition within two minutes. None: ``expected_last_seq`` did not match.

        Raises:
            WireError: the message breaks its own rules; nothing was sent.
        """
        raise NotImplementedError

    async def last_seq(self, stream: Stream) -> int:
        """Sequence of the newest message ever stored, 0 when none."""
        raise NotImplementedError

    async def depth(self, stream: Stream) -> dict[str, int]:
        """For a work queue, messages per key not yet acknowledged; for a log, {'': messages kept}."""
        raise NotImplementedError

    async def work_queue(self, stream: Stream, key: str) -> WorkQueue: ...
    def read_log(self, stream: Stream, start_seq: int) -> AsyncIterator[LogRecord]:
        """Every record from ``start_seq`` on, in order, without gaps, across reconnects; waits at the end."""
        raise NotImplementedError

    def watch_last(self, stream: Stream) -> AsyncIterator[wire.Message]:
        """The newest value now and every newer one; intermediate values may be skipped."""
        raise NotImplementedError

    async def trim(self, stream: Stream, before_seq: int) -> None: ...
    async def key_value(self, stream: Stream) -> KeyValue: ...
    async def dead_letter(self, stream: Stream, *, seq: int, ticket: int, reason: str, data: bytes) -> None:
        """Put bytes nobody could use where the operator finds them."""

    async def publish_metrics(self, metrics: wire.Metrics) -> None: ...
    def watch_metrics(self) -> AsyncIterator[wire.Metrics]: ...
    async def request(self, stream: Stream, key: str, message: wire.Message, *, timeout_s: float, reply: type[M]) -> M:
        """Request/reply over the broker's core; best effort.

        Raises:
            RequestFailed: nobody listens, no answer in time, or an answer that does not decode.
        """
        raise NotImplementedError
