"""A log that is read ahead gives the records, and the groups, that reading them one at a time
gives.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import pytest
from large_groups import group

from broker.contract import codec, wire
from broker.contract.streams import SAMPLES
from broker.errors import LostState
from broker.jetstream.api import StoredEntry
from broker.jetstream.bus import Bus, LogRecord
from broker.jetstream.parts import FetchedParts, GroupParts, hash_encoding
from broker.jetstream.read_ahead import ENTRY_BYTES

SIZE = 20_000


class StoredParts(GroupParts):
    """Parts in memory, which arrive in any order."""

    def __init__(self) -> None:
        self.uploads: dict[str, bytes] = {}
        self.under_way = self.most_bytes = self.num_fetched = 0
        self.random = random.Random(0)

    def store(self, ticket: int, upload: str) -> wire.Parted:
        data = self.uploads[upload] = codec.encode(group(ticket, SIZE, pools=[]))
        return wire.Parted(
            ticket=ticket,
            domain="lake",
            upload=upload,
            size=len(data),
            part_bytes=65536,
            digest=hash_encoding(data),
        )

    async def fetch(self, parted: wire.Parted) -> FetchedParts:
        self.num_fetched += 1
        self.under_way += parted.size
        self.most_bytes = max(self.most_bytes, self.under_way)
        try:
            for _ in range(self.random.randrange(5)):
                await asyncio.sleep(0)
            if (data := self.uploads.get(parted.upload)) is None:
                return FetchedParts(bytearray(), "", "part 0 of 1 is missing")
            return FetchedParts(bytearray(data), hash_encoding(data))
        finally:
            self.under_way -= parted.size


class MadeUpLog(Bus):
    """A log in memory, with the parts of its groups."""

    def __init__(self, messages: list[wire.Message], parts: StoredParts) -> None:
        self.run, self.messages, self._parts = "demo", messages, parts
        self.counts = type("Counts", (), {"consumed": {SAMPLES.name: 0}})()
        self.num_read = 0
        self.error: Exception | None = None
        self.fails = asyncio.Event()

    async def _log_entries(self, stream: Any, start_seq: int) -> AsyncGenerator[StoredEntry, None]:
        for seq, message in enumerate(self.messages, 1):
            self.num_read += 1
            ticket = {wire.TICKET_HEADER: str(getattr(message, "ticket", 0))}
            yield StoredEntry(seq, "rl.demo.samples", ticket, codec.encode(message))
        if self.error is not None:
            await self.fails.wait()
            raise self.error


def closed(ticket: int) -> wire.Closed:
    return wire.Closed(ticket=ticket, domain="lake", reason="late", detail="", by="x")


async def read(log: MadeUpLog, live: set[int], window_bytes: int) -> list[LogRecord]:
    """Read the log as a learner that ends a ticket with its first record, and issues ticket n + 10
    at the end of n.
    """
    found = []
    async with aclosing(
        log.read_log(SAMPLES, 1, wanted=live.__contains__, window_bytes=window_bytes)
    ) as records:
        async for record in records:
            found.append(record)
            if record.ticket in live:
                live.discard(record.ticket)
                live.add(record.ticket + 10)
            await asyncio.sleep(0)
    return found


@pytest.mark.parametrize("window_bytes", [1, 2 * SIZE, 5 * SIZE, 1000 * SIZE])
async def test_records_are_those_of_reading_one_at_a_time(window_bytes: int) -> None:
    parts, rng = StoredParts(), random.Random(window_bytes)
    messages: list[wire.Message] = []
    for number in range(60):
        ticket = rng.randrange(1, 25)
        messages.append(parts.store(ticket, f"u{number}") if rng.random() < 0.8 else closed(ticket))
    for number in range(0, 60, 7):
        parts.uploads.pop(f"u{number}", None)  # an error that counts like any other record
    live = set(range(1, 11))
    expected = await read(MadeUpLog(messages, parts), set(live), 0)
    assert await read(MadeUpLog(messages, parts), set(live), window_bytes) == expected
    kinds = [type(record.message) for record in expected]
    assert {wire.Group, wire.Parted, wire.Closed, type(None)} == set(kinds)


async def test_window_bounds_what_is_read_ahead() -> None:
    parts = StoredParts()
    log = MadeUpLog([parts.store(ticket, f"u{ticket}") for ticket in range(1, 40)], parts)
    size = len(parts.uploads["u1"])
    window_bytes = 4 * (size + 2 * ENTRY_BYTES)
    async with aclosing(log.read_log(SAMPLES, 1, window_bytes=window_bytes)) as records:
        for seq in range(1, 11):
            assert (await anext(records)).seq == seq
            for _ in range(20):
                await asyncio.sleep(0)
            assert parts.num_fetched == seq + 3  # the current one is in the window, too
            assert log.num_read <= seq + 5
    assert parts.most_bytes <= 4 * size


async def test_group_larger_than_the_window_is_fetched_at_its_turn() -> None:
    parts = StoredParts()
    log = MadeUpLog([parts.store(1, "a"), parts.store(2, "b"), closed(3)], parts)
    found = await read(log, {1, 2, 3}, 100)
    assert [type(record.message) for record in found] == [wire.Group, wire.Group, wire.Closed]


async def test_error_of_the_log_comes_before_what_was_read_ahead() -> None:
    """Nothing of a log whose store is lost may be applied any more."""
    log = MadeUpLog([closed(1), closed(2)], StoredParts())
    log.error = LostState("it ends")
    async with aclosing(log.read_log(SAMPLES, 1, window_bytes=SIZE)) as records:
        assert (await anext(records)).seq == 1
        log.fails.set()
        for _ in range(20):
            await asyncio.sleep(0)
        with pytest.raises(LostState, match="it ends"):
            await anext(records)


async def test_unread_groups_are_abandoned_with_the_reader() -> None:
    parts = StoredParts()
    parts.random = random.Random(3)
    log = MadeUpLog([parts.store(ticket, f"u{ticket}") for ticket in range(1, 6)], parts)
    async with aclosing(log.read_log(SAMPLES, 1, window_bytes=100 * SIZE)) as records:
        await anext(records)
    assert parts.under_way == 0
    assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []
