"""Reads one stored message by its sequence with the time at which it was stored, for display."""

from __future__ import annotations

from dataclasses import dataclass

from broker.contract.streams import Stream
from broker.jetstream.api import find_message
from broker.jetstream.bus import Bus, LogRecord


@dataclass(frozen=True)
class StoredRecord:
    """A record and the time at which it was stored, as RFC 3339 text of the broker's clock."""

    record: LogRecord
    time: str


async def peek_message(bus: Bus, stream: Stream, seq: int) -> StoredRecord | None:
    """Return the message, None if it is not kept."""
    entry = await find_message(bus.link, stream.stream_name(bus.run), seq=seq)
    return None if entry is None else StoredRecord(await bus.record(entry, stream), entry.time)
