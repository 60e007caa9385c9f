"""One stored message by its sequence, with the time at which the broker stored it: for people, nothing decides on it."""

from __future__ import annotations

import base64
from dataclasses import dataclass

from broker.jetstream import Bus, LogRecord
from broker.link import ApiError
from broker.store import NO_MESSAGE
from broker.streams import Stream
from broker.work import decode, ticket_of


@dataclass(frozen=True)
class Stored:
    """A record and when it was stored, as RFC 3339 text of the broker's clock."""

    record: LogRecord
    time: str


async def peek(bus: Bus, stream: Stream, seq: int) -> Stored | None:
    """The message, None when it is not kept."""
    try:
        found = (await bus.link.api(f"STREAM.MSG.GET.{stream.stream_name(bus.run)}", {"seq": seq}))["message"]
    except ApiError as error:
        if error.err_code == NO_MESSAGE:
            return None
        raise
    lines = base64.b64decode(found.get("hdrs", "")).decode().split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines if ": " in line)
    data = base64.b64decode(found.get("data", ""))
    message, error_text = decode(data, stream.messages)
    return Stored(LogRecord(seq, message, error_text, ticket_of(headers), data), str(found.get("time", "")))
