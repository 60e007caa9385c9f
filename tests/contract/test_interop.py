"""Programs that know nothing of this project but MessagePack and NATS read every message, and write
messages that we read.
"""

from __future__ import annotations

import struct
from typing import Any

import msgpack
import msgspec
import nats
import pytest

from broker.contract import codec, wire
from broker.contract.examples import EXAMPLES
from broker.contract.streams import DEAD, SAMPLES, TICKETS
from broker.identity.login import client_options
from broker.jetstream.bus import Bus


def expected(value: Any) -> Any:
    """What another program must find: maps, lists, text, bytes and numbers."""
    if isinstance(value, msgspec.Struct):
        tag = {"type": type(value).__name__} if isinstance(value, wire.Message) else {}
        return tag | {name: expected(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, list):
        return [expected(item) for item in value]
    if isinstance(value, dict):
        return {key: expected(item) for key, item in value.items()}
    return value


@pytest.mark.parametrize("kind", wire.MESSAGES)
def test_plain_msgpack_reads_every_message(kind: type[wire.Message]) -> None:
    assert msgpack.unpackb(codec.encode(EXAMPLES[kind]), strict_map_key=True) == expected(
        EXAMPLES[kind]
    )


@pytest.mark.parametrize("kind", wire.MESSAGES)
def test_what_plain_msgpack_writes_is_read(kind: type[wire.Message]) -> None:
    plain = expected(EXAMPLES[kind])
    assert codec.decode(msgpack.packb(plain), kind) == EXAMPLES[kind]
    reordered = dict(reversed(list(plain.items())))  # a map has no order; the type may come last
    assert codec.decode(msgpack.packb(reordered), *wire.MESSAGES) == EXAMPLES[kind]


def test_defaults_may_be_left_out() -> None:
    plain = {
        "type": "Closed",
        "ticket": 5,
        "domain": "lake",
        "reason": "late",
        "detail": "",
        "by": "me",
    }
    assert codec.decode(msgpack.packb(plain), wire.Closed).eval_step == -1


def test_columns_are_little_endian_bytes() -> None:
    plain = msgpack.unpackb(codec.encode(EXAMPLES[wire.Group]))
    trajectory = plain["trajectories"][0]
    n = len(trajectory["loss_mask"]["data"])
    assert trajectory["token_ids"]["dtype"] == "<i4"
    assert struct.unpack(f"<{n}i", trajectory["token_ids"]["data"]) == (
        1,
        318,
        27,
        905,
        2,
        44,
        27,
        871,
        2,
    )
    assert struct.unpack(f"<{n}f", trajectory["logprobs"]["data"]) == (
        0,
        0,
        0,
        -0.25,
        -0.0625,
        0,
        0,
        -1.5,
        -0.125,
    )
    assert struct.unpack("<4i", trajectory["version_runs"]["data"]) == (11, 3, 12, 1)
    assert list(trajectory["loss_mask"]["data"]) == [0, 0, 0, 1, 1, 0, 0, 1, 1]


async def test_another_client_reads_a_ticket_and_writes_its_end(bus: Bus, broker_url: str) -> None:
    """A hub written elsewhere: takes a ticket with plain nats-py and msgpack, closes it in the log,
    acknowledges.
    """
    ticket = EXAMPLES[wire.Ticket]
    assert isinstance(ticket, wire.Ticket)
    await bus.publish(TICKETS, ticket, key=ticket.domain, ticket=ticket.number)
    client = await nats.connect(broker_url, **client_options(broker_url))
    try:
        stream = client.jetstream()
        queue = await stream.pull_subscribe(
            TICKETS.subject(bus.run, ticket.domain),
            durable="lake",
            stream=TICKETS.stream_name(bus.run),
        )
        (message,) = await queue.fetch(1, timeout=60)
        assert message.headers is not None
        assert message.headers[wire.TICKET_HEADER] == "417"
        plain = msgpack.unpackb(message.data)
        assert plain == expected(ticket)
        closed = {
            "type": "Closed",
            "ticket": plain["number"],
            "domain": plain["domain"],
            "reason": "env_error",
            "detail": "x",
            "by": "go",
        }
        headers = {wire.TICKET_HEADER: str(plain["number"])}
        await stream.publish(SAMPLES.subject(bus.run), msgpack.packb(closed), headers=headers)
        await stream.publish(SAMPLES.subject(bus.run), b"\x80", headers=headers)
        await message.ack_sync()
    finally:
        await client.close()

    records = bus.read_log(SAMPLES, 1)
    first, second = await anext(records), await anext(records)
    await records.aclose()
    assert first.message == wire.Closed(
        ticket=417, domain="lake", reason="env_error", detail="x", by="go"
    )
    assert (second.message, second.ticket) == (None, 417)
    assert "missing required field `type`" in second.error
    assert await bus.depth(TICKETS) == {}
    assert await bus.depth(DEAD) == {"": 0}
