"""One stored message by its sequence, with the time at which the broker stored it: for people, nothing decides on it."""

from __future__ import annotations

from dataclasses import dataclass

from broker.api import find
from broker.delivery import decode, ticket_of
from broker.jetstream import Bus, LogRecord
from broker.streams import Stream


@dataclass(frozen=True)
class Stored:
    """A record and when it was stored, as RFC 3339 text of the broker's clock."""

    record: LogRecord
    time: str


async def peek(bus: Bus, stream: Stream, seq: int) -> Stored | None:
    """The message, None when it is not kept."""
    found = await find(bus.link, stream.stream_name(bus.run), seq=seq)
    if found is None:
        return None
    message, error = decode(found.data, stream.messages)
    return Stored(LogRecord(seq, message, error, ticket_of(found.headers), found.data), found.time)
