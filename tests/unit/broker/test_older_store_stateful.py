"""A log's reader while the broker restarts with its own store or an older one: it reads one history
or says so.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any
from unittest.mock import patch

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from broker.contract import codec, wire
from broker.contract.streams import SAMPLES
from broker.errors import LostState
from broker.jetstream import bus as jetstream
from broker.jetstream.api import StoredEntry
from broker.jetstream.bus import Bus
from broker.jetstream.stream_counts import StreamCounts

# all are equal
DATA = codec.encode(wire.Closed(ticket=1, domain="lake", reason="deadline", detail="", by="hub"))


class Store:
    """A stream in memory, and the link to it."""

    def __init__(self) -> None:
        self.kept: dict[int, StoredEntry] = {}
        self.first, self.last, self.clock, self.lives = 1, 0, 0, 0

    def publish(self) -> None:
        self.last, self.clock = self.last + 1, self.clock + 1
        self.kept[self.last] = StoredEntry(self.last, "samples", None, DATA, stored_ns=self.clock)

    def trim(self, before: int) -> None:
        self.first = max(self.first, before)
        self.kept = {seq: entry for seq, entry in self.kept.items() if seq >= self.first}


async def _bounds(store: Store, _: str, *, known: int = 0) -> tuple[int, int]:
    return (min(store.kept), store.last) if store.kept else (store.last + 1, store.last)


async def _find(store: Store, _: str, *, seq: int) -> StoredEntry | None:
    return store.kept.get(seq)


async def _follow(
    store: Store, _: str, start: Callable[[], Awaitable[dict[str, Any]]]
) -> AsyncGenerator[StoredEntry, None]:
    while True:
        following, life = (await start())["opt_start_seq"], store.lives
        while store.lives == life:
            if (entry := store.kept.get(following)) is None:
                await asyncio.sleep(0)
                continue
            following += 1
            yield entry


class OlderStoreMachine(RuleBasedStateMachine):
    """Hubs publish, a learner reads and trims behind what it has read, and the broker restarts."""

    @initialize()
    def start(self) -> None:
        self.store, self.loop = Store(), asyncio.new_event_loop()
        self.copies: list[tuple[dict[int, StoredEntry], int, int]] = []
        self.has_lost = False
        bus: Any = object.__new__(Bus)
        bus.run, bus.link, bus.counts = "r", self.store, StreamCounts()
        self.records = bus.read_log(SAMPLES, 1)
        self.history: dict[int, int] = {}  # sequence -> time of what was read

    @rule(count=st.integers(1, 4))
    def publish(self, count: int) -> None:
        for _ in range(count):
            self.store.publish()

    @precondition(lambda self: not self.has_lost and self.store.last > len(self.history))
    @rule(count=st.integers(1, 4))
    def read_records(self, count: int) -> None:
        for _ in range(min(count, self.store.last - len(self.history))):
            was = self.is_same_history()
            try:
                record = self.loop.run_until_complete(anext(self.records))
            except LostState:
                assert not was, "a reader of its own store must go on"
                self.has_lost = True
                return
            assert was, "it reads on in another history"
            assert record.seq == len(self.history) + 1
            self.history[record.seq] = self.store.kept[record.seq].stored_ns

    def is_same_history(self) -> bool:
        """Whether the store holds what was read, as far as it keeps it."""
        kept = self.store.kept
        return all(kept[seq].stored_ns == time for seq, time in self.history.items() if seq in kept)

    @precondition(lambda self: self.history)
    @rule(back=st.integers(0, 3))
    def trim(self, back: int) -> None:
        """Behind a checkpoint's position, whose record stays."""
        self.store.trim(max(1, len(self.history) - back))

    @rule()
    def copy_store(self) -> None:
        self.copies.append((dict(self.store.kept), self.store.first, self.store.last))

    @rule()
    def restart(self) -> None:
        self.store.lives += 1

    @precondition(lambda self: self.copies)
    @rule(pick=st.integers(0, 5), grown_by=st.integers(0, 6))
    def restart_with_older(self, pick: int, grown_by: int) -> None:
        """Hubs are back first, and store ``grown_by`` records."""
        self.store.lives += 1
        kept, self.store.first, self.store.last = self.copies[pick % len(self.copies)]
        self.store.kept = dict(kept)
        for _ in range(grown_by):
            self.store.publish()

    def teardown(self) -> None:
        if hasattr(self, "loop"):
            self.loop.run_until_complete(self.records.aclose())
            self.loop.close()


def test_older_store_under_any_interleaving() -> None:
    with (
        patch.object(jetstream, "follow_stream", _follow),
        patch.object(jetstream, "stream_bounds", _bounds),
        patch.object(jetstream, "find_message", _find),
    ):
        run_state_machine_as_test(
            OlderStoreMachine,
            settings=settings(max_examples=200, stateful_step_count=25, deadline=None),
        )
