"""One stored message by its sequence, with the time at which the broker stored it: for people, nothing decides on
it.
"""

from __future__ import annotations

from dataclasses import dataclass

from broker.contract.streams import Stream
from broker.jetstream.api import find
from broker.jetstream.bus import Bus, LogRecord


@dataclass(frozen=True)
class StoredRecord:
    """A record and when it was stored, as RFC 3339 text of the broker's clock."""

    record: LogRecord
    time: str


async def peek(bus: Bus, stream: Stream, seq: int) -> StoredRecord | None:
    """The message, None when it is not kept."""
    found = await find(bus.link, stream.stream_name(bus.run), seq=seq)
    if found is None:
        return None
    return StoredRecord(await bus.record(found, stream), found.time)
