"""Reads a log ahead within a window of bytes: the parts of the next groups arrive while a reader
works on earlier ones.

Records are yielded in the order of the log, each as if it had been read alone: whether its group is
wanted is decided when its turn comes, and a group that was fetched in vain is dropped.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final

from broker.contract import wire
from broker.jetstream.api import StoredEntry
from broker.jetstream.delivery import Decoded, decode_message
from broker.jetstream.parts import FetchedParts, GroupParts

# a record that refers to parts has fewer; what is larger is decoded when its turn comes
PARTED_BYTES: Final = 4096
ENTRY_BYTES: Final = 1024  # of memory that an entry needs in addition to its data


@dataclass(eq=False)
class PendingRecord:
    """An entry of the log that was read ahead."""

    entry: StoredEntry
    decoded: Decoded | None  # None: not yet, because it is large
    num_bytes: int  # that it holds in the window
    fetching: asyncio.Task[FetchedParts] | None = None

    @property
    def parted(self) -> wire.Parted | None:
        """The reference to a group in parts, if this is one."""
        message = self.decoded[0] if self.decoded is not None else None
        return message if isinstance(message, wire.Parted) else None


class LogWindow:
    """Entries of a log in order, with the parts of those behind the current one under way.

    Args:
        entries: of the log, in order; closed with ``pending``.
        types: of the stream's messages.
        is_wanted: whether to fetch this ticket's group ahead; called again for each record of a
            group that was not wanted.
        window_bytes: that all entries behind the current one may hold; a single larger one waits
            for its turn.
    """

    def __init__(
        self,
        entries: AsyncGenerator[StoredEntry, None],
        types: tuple[type[wire.Message], ...],
        parts: GroupParts,
        is_wanted: Callable[[int], bool],
        window_bytes: int,
    ) -> None:
        self._entries = entries
        self._types = types
        self._parts = parts
        self._is_wanted = is_wanted
        self._window_bytes = window_bytes
        self._used = 0
        self._queue: deque[PendingRecord] = deque()
        self._undecided: list[PendingRecord] = []  # groups in parts that are not fetched, in order
        self._changed = asyncio.Event()

    async def pending(self) -> AsyncGenerator[PendingRecord, None]:
        """Yield the entries in order; each frees its bytes when the next is requested."""
        filling = asyncio.create_task(self._fill())
        try:
            while (record := await self._head(filling)) is not None:
                try:
                    yield record
                finally:
                    self._release(record)
        finally:
            filling.cancel()
            tasks = [record.fetching for record in self._queue if record.fetching is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(filling, *tasks, return_exceptions=True)

    async def _head(self, filling: asyncio.Task[None]) -> PendingRecord | None:
        """Return the next entry, None at the end of the log; raise an error of the log at once: its
        store is lost.
        """
        while not self._queue and not filling.done():
            await self._change()
        if filling.done():
            filling.result()
        if not self._queue:
            return None
        # what the reader did with the last record may have issued their tickets
        self._fetch_wanted()
        record = self._queue.popleft()
        if record in self._undecided:
            self._undecided.remove(record)
        return record

    async def _fill(self) -> None:
        try:
            async with aclosing(self._entries) as entries:
                async for entry in entries:
                    decoded = (
                        decode_message(entry.data, self._types)
                        if len(entry.data) <= PARTED_BYTES
                        else None
                    )
                    record = PendingRecord(entry, decoded, len(entry.data) + ENTRY_BYTES)
                    while self._used and self._used + record.num_bytes > self._window_bytes:
                        await self._change()
                    self._used += record.num_bytes
                    self._queue.append(record)
                    if record.parted is not None:
                        self._undecided.append(record)
                    self._changed.set()
                    while not self._fetch_wanted():
                        await self._change()
        finally:
            self._changed.set()

    def _fetch_wanted(self) -> bool:
        """Fetch the groups that are wanted, in order; return False if the window has no room for
        all of them.
        """
        undecided = []
        has_room = True
        for index, record in enumerate(self._undecided):
            parted = record.parted
            if parted is None or not self._is_wanted(parted.ticket):
                undecided.append(record)
                continue
            if self._used > record.num_bytes and self._used + parted.size > self._window_bytes:
                undecided += self._undecided[index:]
                has_room = False
                break
            self._used += parted.size
            record.num_bytes += parted.size
            record.fetching = asyncio.create_task(self._parts.fetch(parted))
        self._undecided = undecided
        return has_room

    def _release(self, record: PendingRecord) -> None:
        if record.fetching is not None:
            _abandon_task(record.fetching)  # if its group was not wanted after all
            record.fetching = None  # it holds the bytes
        self._used -= record.num_bytes
        self._changed.set()

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()


def _abandon_task(task: asyncio.Task[FetchedParts]) -> None:
    """Cancel a task; one that has failed is not reported as forgotten."""
    if not task.cancel() and not task.cancelled():
        task.exception()
