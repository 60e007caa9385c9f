"""Groups in parts: as exactly-once as any message, whatever is missing, damaged or left behind."""

from __future__ import annotations

import asyncio
import sys
import tempfile
import threading
from contextlib import aclosing
from pathlib import Path

import msgspec
import nats
import pytest
from large_groups import MB, group
from slow_link import slow_link
from waits import LONG_S, until

from broker.contract import codec, wire
from broker.contract.sizes import INLINE_BYTES, PART_BYTES
from broker.contract.streams import EPISODES, EVALS, PARTS, SAMPLES
from broker.errors import TooLarge
from broker.identity.login import client_options
from broker.jetstream import bus as jetstream
from broker.jetstream.bus import Bus, LogRecord
from broker.jetstream.parts import ended_tickets
from broker.jetstream.publish import MESSAGE_ID, store_message
from broker.jetstream.stored_message import peek_message
from broker.server.private_server import BrokerServer

SIZE = 5 * MB
COUNT = 5  # parts of that size


async def read(bus: Bus, count: int, wanted: object = None) -> list[LogRecord]:
    found: list[LogRecord] = []
    options = {} if wanted is None else {"wanted": wanted}
    async with asyncio.timeout(LONG_S), aclosing(bus.read_log(SAMPLES, 1, **options)) as records:  # type: ignore[arg-type]
        async for record in records:
            found.append(record)
            if len(found) == count:
                break
    return found


async def num_parts(bus: Bus) -> int:
    return (await bus.depth(PARTS))[""]


async def parted(bus: Bus, seq: int = 1) -> wire.Parted:
    record = (await read(bus, seq, lambda _: False))[-1]
    assert isinstance(record.message, wire.Parted)
    return record.message


async def tamper(bus: Bus, of: wire.Parted, number: int, data: bytes | None) -> None:
    """Replace one part, or delete it."""
    client = await nats.connect(bus.link.url, **client_options(bus.link.url))
    stream, subject = (
        client.jetstream(),
        PARTS.subject(bus.run, f"t.{of.ticket}.{of.upload}.{number}"),
    )
    await stream.purge_stream(PARTS.stream_name(bus.run), subject=subject)
    if data is not None:
        await stream.publish(subject, data)
    await client.close()


async def test_a_group_in_parts_arrives_as_it_was(bus: Bus) -> None:
    sent = group(7, SIZE, pools=[])
    assert await bus.publish(SAMPLES, sent, ticket=7, message_id="tickets-7") == 1
    small = wire.Closed(ticket=8, domain="lake", reason="late", detail="", by="x")
    await bus.publish(SAMPLES, small, ticket=8)
    large, closed = await read(bus, 2)
    assert (large.message, large.error, large.ticket) == (sent, "", 7)
    assert bytes(large.data) == codec.encode(sent)
    assert closed.message == small
    assert await num_parts(bus) == COUNT
    found = await peek_message(bus, SAMPLES, 1)
    assert found is not None
    assert found.record == large


async def test_a_small_group_travels_whole(bus: Bus) -> None:
    await bus.publish(SAMPLES, group(1, INLINE_BYTES - 2000, pools=[]), ticket=1)
    assert await num_parts(bus) == 0
    (record,) = await read(bus, 1)
    assert isinstance(record.message, wire.Group)


async def test_a_queue_gives_it_and_its_ack_deletes_the_parts(bus: Bus) -> None:
    sent = group(7, SIZE)
    await bus.publish(EPISODES, sent, key="judge", ticket=7)
    (delivery,) = await (await bus.work_queue(EPISODES, "judge")).fetch(1, 5.0)
    assert isinstance(delivery.message, wire.Parted)
    assert (await delivery.load(), delivery.error) == (sent, "")
    assert delivery.data == codec.encode(sent)[: 1 << 20]
    await delivery.ack()
    await until(lambda: _empty(bus))
    assert await bus.depth(EPISODES) == {}


async def _empty(bus: Bus) -> bool:
    return await num_parts(bus) == 0


async def test_it_is_stored_once(bus: Bus) -> None:
    """Two hubs end the same ticket: the second record is dropped; its parts stay for the trimming."""
    sent = group(7, SIZE, pools=[])
    assert [
        await bus.publish(SAMPLES, sent, ticket=7, message_id="tickets-7") for _ in range(2)
    ] == [1, 1]
    assert await num_parts(bus) == 2 * COUNT
    assert await bus.trim_parts(SAMPLES, keep=lambda ticket: ticket != 7) == 1
    assert await num_parts(bus) == 0


@pytest.mark.parametrize(
    ("number", "data", "why"),
    [
        (3, None, "part 3 of 5 is missing"),
        (4, b"short", "part 4 of 5 has 5 bytes; must be"),
        (2, bytes(PART_BYTES), "its bytes are damaged: digest"),
    ],
)
async def test_parts_that_are_missing_or_damaged_are_said(
    bus: Bus, number: int, data: bytes | None, why: str
) -> None:
    await bus.publish(SAMPLES, group(7, SIZE, pools=[]), ticket=7)
    await tamper(bus, await parted(bus), number, data)
    await bus.publish(
        SAMPLES, wire.Closed(ticket=8, domain="lake", reason="late", detail="", by="x"), ticket=8
    )
    broken, after = await read(bus, 2)
    assert (broken.message, broken.ticket) == (None, 7)
    assert broken.error.startswith("Group in parts, ticket 7, upload ")
    assert why in broken.error
    assert isinstance(after.message, wire.Closed)


async def test_a_record_that_lies_is_refused(bus: Bus) -> None:
    """It names another ticket's group, or a body larger than any may be."""
    await bus.publish(SAMPLES, group(7, SIZE, pools=[]), ticket=7)
    honest = await parted(bus)
    subject = SAMPLES.subject(bus.run)
    name = SAMPLES.stream_name(bus.run)
    huge = msgspec.msgpack.encode(msgspec.structs.replace(honest, size=(1 << 30) + 1))
    await store_message(bus.link, name, subject, huge, {MESSAGE_ID: "huge"})
    whole = msgspec.structs.replace(honest, domain="gsm8k")
    await store_message(bus.link, name, subject, codec.encode(whole), {MESSAGE_ID: "other"})
    _, large, other = await read(bus, 3)
    assert large.error == "Parted.size: 1073741825; 1 to 2^30"
    assert other.error.endswith("it holds the group of ticket 7, domain lake, evaluation step -1")


async def test_what_is_not_wanted_is_not_fetched(bus: Bus) -> None:
    for _ in range(2):
        await bus.publish(SAMPLES, group(7, SIZE, pools=[]), ticket=7)
    live, asked = {7}, []

    def wanted(ticket: int) -> bool:
        asked.append(ticket)
        return ticket in live

    async with (
        asyncio.timeout(LONG_S),
        aclosing(bus.read_log(SAMPLES, 1, wanted=wanted)) as records,
    ):
        first = await anext(records)
        assert isinstance(first.message, wire.Group)
        live.clear()  # it has ended: its parts may go
        await bus.trim_parts(SAMPLES, keep=live.__contains__)
        second = await anext(records)
    assert isinstance(second.message, wire.Parted)
    assert (second.message.ticket, second.error, asked) == (7, "", [7, 7])


async def test_log_read_ahead_gives_the_records_of_one_read_by_one(bus: Bus) -> None:
    """Groups in parts, small ones, closings, duplicates, a lost part; and a reader that ends a
    ticket at its record.
    """
    for number in range(1, 13):
        ticket = number if number % 4 else number - 1  # the fourth is a duplicate
        await bus.publish(
            SAMPLES, group(ticket, SIZE if number % 3 else 5000, pools=[]), ticket=ticket
        )
        closed = wire.Closed(ticket=100 + number, domain="lake", reason="late", detail="", by="x")
        await bus.publish(SAMPLES, closed, ticket=100 + number)
    await tamper(bus, await parted(bus, 9), 3, None)

    async def read_as_learner(window_bytes: int) -> list[LogRecord]:
        live, found = set(range(1, 13)), list[LogRecord]()
        log = bus.read_log(SAMPLES, 1, wanted=live.__contains__, window_bytes=window_bytes)
        async with asyncio.timeout(LONG_S), aclosing(log) as records:
            while len(found) < 24:
                found.append(await anext(records))
                live.discard(found[-1].ticket)
        return found

    expected = await read_as_learner(0)
    assert {type(record.message) for record in expected} == {
        wire.Group,
        wire.Parted,
        wire.Closed,
        type(None),
    }
    for window_bytes in (SIZE // 2, 3 * SIZE, 100 * SIZE):
        assert await read_as_learner(window_bytes) == expected


async def test_trimming_keeps_what_may_still_be_read(bus: Bus) -> None:
    for ticket in (1, 2, 3):
        await bus.publish(SAMPLES, group(ticket, SIZE, pools=[]), ticket=ticket)
    await bus.publish(EVALS, group(2, SIZE, pools=[], eval_step=0), ticket=2)
    assert await bus.trim_parts(SAMPLES, keep=lambda ticket: ticket >= 3) == 2
    assert await num_parts(bus) == 2 * COUNT
    one, two, three = await read(bus, 3)
    assert [one.message, two.message] == [None, None]
    assert isinstance(three.message, wire.Group)
    assert await bus.trim_parts(EVALS, keep=lambda _: False) == 1
    assert await num_parts(bus) == COUNT


_PUBLISH = """
import asyncio, sys
sys.path.insert(0, sys.argv[3])
from large_groups import MB, group
from broker.jetstream.bus import Bus
from broker.contract.streams import SAMPLES
async def publish():
    bus = await Bus.connect(sys.argv[1], sys.argv[2], name="victim")
    print("begins", flush=True)
    await bus.publish(SAMPLES, group(7, 8 * MB, pools=[]), ticket=7, message_id="tickets-7")
asyncio.run(publish())
"""


async def test_what_a_killed_publisher_left_behind_is_trimmed(bus: Bus, broker_url: str) -> None:
    """It dies between two parts; the ticket is delivered again, and another process publishes the
    group.
    """
    async with slow_link(broker_url, up=2 * MB) as link:
        arguments = [
            sys.executable,
            "-c",
            _PUBLISH,
            link.url,
            bus.run,
            str(Path(__file__).parents[1] / "kit"),
        ]
        victim = await asyncio.create_subprocess_exec(*arguments)
        await until(lambda: _some(bus))
        victim.kill()
        await victim.wait()
    left = await num_parts(bus)
    assert 0 < left < 8
    assert await bus.depth(SAMPLES) == {"": 0}
    sent = group(7, SIZE, pools=[])
    await bus.publish(SAMPLES, sent, ticket=7, message_id="tickets-7")
    assert [record.message for record in await read(bus, 1)] == [sent]
    assert await num_parts(bus) >= left + COUNT
    assert await bus.trim_parts(SAMPLES, keep=lambda ticket: ticket > 7) == 1
    assert await num_parts(bus) == 0


async def _some(bus: Bus) -> bool:
    return await num_parts(bus) > 0


def test_which_tickets_have_ended() -> None:
    subjects = [f"rl.run.parts.t.{ticket}.up.{part}" for ticket in (9, 10, 2) for part in range(3)]
    assert ended_tickets(subjects, lambda ticket: ticket == 9) == [2, 10]
    assert ended_tickets([], lambda _: False) == []


async def test_many_subjects_are_listed_page_by_page(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker lists so many subjects at a time, 100,000 of them."""
    for ticket in range(1, 31):
        subject = PARTS.subject(bus.run, f"t.{ticket}.up.0")
        await store_message(
            bus.link, PARTS.stream_name(bus.run), subject, b"x", {MESSAGE_ID: str(ticket)}
        )
    pages = []
    ask = jetstream.call_api

    async def small_pages(
        link: object, request: str, body: dict[str, object] | None = None
    ) -> dict[str, object]:
        answer = await ask(link, request, body)  # type: ignore[arg-type]
        if body and "offset" in body:
            pages.append(body["offset"])
            answer["state"]["subjects"] = dict.fromkeys(sorted(answer["state"]["subjects"])[:10], 1)
        return answer

    monkeypatch.setattr("broker.jetstream.parts.call_api", small_pages)
    assert await bus.trim_parts(SAMPLES, keep=lambda ticket: ticket % 2 == 0) == 15
    assert pages == [0, 10, 20]


async def test_a_broker_of_small_messages_takes_any_group(tmp_path: Path) -> None:
    """nats-server's own default is 1 MiB."""
    with (
        tempfile.TemporaryDirectory(prefix="rlearner-small-") as folder,
        BrokerServer(folder, store_max_gib=1024) as server,
    ):
        bus = await Bus.connect(server.url, "demo", name="x", deadline_s=60)
        await bus.ensure_streams()
        bus.link._client._max_payload = 1 << 20
        sent = group(1, SIZE, pools=[])
        assert await bus.publish(SAMPLES, sent, ticket=1) == 1
        (record,) = await read(bus, 1)
        assert record.message == sent
        bus.link._client._max_payload = 40_000
        with pytest.raises(TooLarge, match="the broker takes messages of 40000 bytes only"):
            await bus.publish(SAMPLES, sent, ticket=1)
        await bus.close()


async def test_the_event_loop_goes_on_while_large_groups_are_read(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """8 MB take 10 ms and more to decode and check; records come in the order of the log all the
    same.
    """
    count = 6
    for ticket in range(1, count + 1):
        await bus.publish(
            SAMPLES, group(ticket, 8 * MB if ticket % 2 else MB, pools=[]), ticket=ticket
        )
        await bus.publish(
            SAMPLES,
            wire.Closed(ticket=ticket, domain="lake", reason="late", detail="", by="x"),
            ticket=ticket,
        )
    decode, in_loop, aside = codec.decode, list[int](), list[int]()

    def watched(data: bytes, *types: type[wire.Message]) -> wire.Message:
        here = in_loop if threading.current_thread() is threading.main_thread() else aside
        here.append(len(data))
        return decode(data, *types)

    monkeypatch.setattr(codec, "decode", watched)
    loop = asyncio.get_running_loop()
    longest, going = 0.0, True

    async def beat() -> None:
        nonlocal longest
        while going:
            before = loop.time()
            await asyncio.sleep(0.001)
            longest = max(longest, loop.time() - before)

    beating = asyncio.create_task(beat())
    records = await read(bus, 2 * count)
    going = False
    await beating
    assert [record.ticket for record in records] == [
        ticket for ticket in range(1, count + 1) for _ in range(2)
    ]
    assert [type(record.message) for record in records] == [wire.Group, wire.Closed] * count
    assert len(aside) == count
    assert max(in_loop) < 1000
    print(f"longest stall {longest * 1000:.1f} ms")
