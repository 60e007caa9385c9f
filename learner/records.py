"""What a learner writes down of the records it consumes: the ledger file and, where asked for, the archive of the records."""

from __future__ import annotations

import asyncio
import errno
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from broker import wire
from broker.errors import UserError
from broker.jetstream import LogRecord
from broker.process import Stop
from learner import archive, ledgerfile
from learner.archive import Archive
from learner.config import SamplesSection
from learner.intake import Intake, version_bounds
from learner.ledger import Action, Ended, Entry, Ledger
from learner.ledgerfile import LedgerFile, Line, Scribe, digest

log = logging.getLogger(__name__)

FULL: Final = (errno.ENOSPC, errno.EDQUOT)
TRY_EVERY_S: Final = 1.0
SAY_EVERY_S: Final = 5.0


class Records:
    """The service around ``Scribe``. On a full disk it waits and goes on when there is space.

    Args:
        folder: the run's; files there are cut back to what ``ledger`` stands by.
        ledger: as it was resumed.
        stop: ends a wait for space.
    """

    def __init__(self, folder: Path, ledger: Ledger, samples: SamplesSection, stop: Stop) -> None:
        self._folder, self._ledger, self._stop = folder, ledger, stop
        self._file = LedgerFile(folder / ledgerfile.NAME, ledger)
        self._scribe = Scribe(self._file.lines)
        self._newest = self._file.lines[-1] if self._file.lines else None
        self._file.lines = []
        self._archive: Archive | None = None
        if samples.keep:
            self._archive = Archive(folder / archive.FOLDER, ledger.state.position, int(samples.max_file_mib * 2**20))

    async def began(self, actions: Sequence[Action]) -> None:
        """The learner has opened its credit."""
        lines = self._scribe.begin(actions, self._ledger)
        if lines != [self._newest]:
            await self._write(lines)

    async def consumed(self, entry: LogRecord, read: Intake, actions: Sequence[Action]) -> None:
        """The ledger has applied a record."""
        found = digest(entry.data)
        if self._archive is not None:
            await self._patiently(partial(asyncio.to_thread, self._archive.append, entry, found))
        reason = read.record.reason if isinstance(read.record, Ended) else ""
        group = read.group or (entry.message if isinstance(entry.message, wire.Group) else None)
        bounds = version_bounds([group]) if group is not None else None
        await self._write(self._scribe.record(actions, seq=entry.seq, data_digest=found, reason=reason, bounds=bounds))

    async def completed(self, taken: Sequence[Entry], trained: Collection[int], actions: Sequence[Action]) -> None:
        """The ledger has completed a step, made of ``taken``; ``trained`` are the tickets among them that were trained on."""
        await self._write(self._scribe.step(taken, trained, actions, self._ledger))

    async def sync(self) -> None:
        """All of it survives a power loss; to be awaited before a checkpoint is written that covers it."""
        await self._patiently(partial(asyncio.to_thread, self._sync))

    def close(self) -> None:
        self._file.close()
        if self._archive is not None:
            self._archive.close()

    async def _write(self, lines: Sequence[Line]) -> None:
        if lines:
            data = ledgerfile.encode(lines)
            await self._patiently(partial(self._append, data))

    async def _append(self, data: bytes) -> None:
        self._file.append(data)  # into the page cache: microseconds

    def _sync(self) -> None:
        self._file.sync()
        if self._archive is not None:
            self._archive.sync()

    async def _patiently(self, job: Callable[[], Awaitable[None]]) -> None:
        """Repeat a write until there is space for it.

        Raises:
            UserError: asked to stop meanwhile, or the folder cannot be written for another reason.
        """
        said = 0.0
        while True:
            try:
                await job()
                return
            except OSError as error:
                if error.errno not in FULL or self._stop.asked.is_set():
                    raise UserError(f"{self._folder}: {error.strerror}") from None
                if time.monotonic() - said > SAY_EVERY_S:
                    said = time.monotonic()
                    log.warning("%s: %s; training waits for space", self._folder, error.strerror)
            await asyncio.sleep(TRY_EVERY_S)
