"""Writes the ledger file and, if configured, the archive of the consumed records."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from broker.contract import wire
from broker.jetstream.bus import LogRecord
from broker.runtime.process import Stop
from learner.algorithm.token_figures import StepTokens
from learner.config import SamplesSection
from learner.credit import archive, ledger_file, ledger_segments
from learner.credit.archive import SampleArchive
from learner.credit.archive_trim import BoundedArchive, max_groups
from learner.credit.ledger import Action, Ledger, LedgerEntry, RulesUpdate, TicketEnd
from learner.credit.ledger_file import LedgerLine, LedgerLineBuilder, digest_record
from learner.credit.record_intake import RecordIntake, version_bounds
from learner.credit.token_files import TokenFiles
from learner.disk_retry import DiskRetry

# Writing a record up to this size is faster than starting work in a thread.
AT_ONCE_BYTES: Final = 2**16


class LedgerRecorder:
    """Service around ``LedgerLineBuilder``, which waits while the folder cannot be written.

    Args:
        folder: the run's; its files are cut back to the position of ``ledger``.
        ledger: the resumed one.
        stop: ends a wait for space.
        say: receives a text when the folder cannot be written, and an empty one when it can again.
        max_ledger_bytes: size from which on a new ledger file begins at the next boundary.
    """

    def __init__(
        self,
        folder: Path,
        ledger: Ledger,
        samples: SamplesSection,
        stop: Stop,
        say: Callable[[str], None] = lambda _: None,
        max_ledger_bytes: int = ledger_segments.MAX_BYTES,
    ) -> None:
        self._folder = folder
        self._ledger = ledger
        self._disk_retry = DiskRetry(folder, stop, "training waits", say)
        # A checkpoint's sync may run while a new file begins, both in threads.
        self._lock = threading.Lock()
        self._file, lines = ledger_segments.resume_file(
            folder / ledger_segments.FOLDER, ledger, max_ledger_bytes
        )
        self._line_builder = LedgerLineBuilder(lines)
        self._archive: SampleArchive | None = None
        self._tokens: TokenFiles | None = None
        place = folder / archive.FOLDER
        position = ledger.state.position
        keep_steps = 0
        max_bytes = int(samples.max_file_mib * 2**20)
        if samples.keep is True:
            self._archive = SampleArchive(place, position, max_bytes)
        elif samples.keep:
            self._archive = BoundedArchive(place, position, max_bytes, samples.keep)
            # The oldest and the newest step may have groups that are not kept.
            keep_steps = 2 + max_groups(samples.keep) // ledger.rules.groups_per_step
        if self._archive is not None:
            self._tokens = TokenFiles(place, ledger.state.version, keep_steps)
        else:
            archive.mark_paused(place, position)

    async def began(self, actions: Sequence[Action], lost: Sequence[LedgerEntry] = ()) -> None:
        """Write the lines of opening the credit, and of arrived groups that the log has lost."""
        await self._write(self._line_builder.begin(actions, self._ledger))
        await self._leave_full_file()
        await self._write(self._line_builder.lost(lost))

    async def consumed(
        self, entry: LogRecord, intake: RecordIntake, actions: Sequence[Action]
    ) -> None:
        """Write the lines of an applied record, and archive it."""
        record_digest = digest_record(entry.data)
        # Without its name, a later incarnation archives this record.
        if self._archive is not None and self._file.has_name:
            await self._archive_record(self._archive, entry, record_digest)
        reason = intake.record.reason if isinstance(intake.record, TicketEnd) else ""
        group = intake.group or (entry.message if isinstance(entry.message, wire.Group) else None)
        bounds = version_bounds([group]) if group is not None else None
        rules = intake.record.rules if isinstance(intake.record, RulesUpdate) else None
        rows = self._line_builder.record(
            actions,
            seq=entry.seq,
            data_digest=record_digest,
            reason=reason,
            bounds=bounds,
            rules=rules,
        )
        await self._write(rows)

    async def completed(
        self,
        entries: Sequence[LedgerEntry],
        trained_tickets: Collection[int],
        actions: Sequence[Action],
        tokens: StepTokens | None = None,
    ) -> None:
        """Write the lines of a step of the groups ``entries``.

        Args:
            trained_tickets: those of the groups that were trained on.
            tokens: figures of their tokens, if recorded.
        """
        if self._tokens is not None and tokens is not None and self._file.has_name:
            self._tokens.write(self._ledger.state.version, tokens)
        await self._write(self._line_builder.step(entries, trained_tickets, actions, self._ledger))
        await self._leave_full_file()

    async def sync(self) -> None:
        """Make everything written survive a power loss, as a checkpoint that covers it requires."""
        await self._disk_retry.in_thread(self._sync)

    def close(self) -> None:
        self._file.close()
        if self._archive is not None:
            self._archive.close()
        if self._tokens is not None:
            self._tokens.close()

    async def _write(self, lines: Sequence[LedgerLine]) -> None:
        if lines:
            await self._disk_retry(partial(self._append, ledger_file.encode_lines(lines)))

    async def _leave_full_file(self) -> None:
        """Begin a new file at a boundary, by its lines alone: every incarnation writes the same."""
        step = self._line_builder.end.step
        if self._file.is_full and step > self._file.first:
            await self._disk_retry.in_thread(
                self._leave, step, self._line_builder.summary(self._ledger.rules)
            )

    def _leave(self, step: int, summary: LedgerLine) -> None:
        with self._lock:
            self._file.leave(step, summary)

    async def _append(self, data: bytes) -> None:
        # Not in a thread: a write into the page cache takes microseconds.
        self._file.append(data)

    async def _archive_record(
        self, archive: SampleArchive, entry: LogRecord, record_digest: str
    ) -> None:
        # A file that begins may remove others.
        if len(entry.data) > AT_ONCE_BYTES or archive.is_full:
            await self._disk_retry.in_thread(archive.append, entry, record_digest)
            return

        async def append() -> None:
            archive.append(entry, record_digest)

        await self._disk_retry(append)

    def _sync(self) -> None:
        with self._lock:
            self._file.sync()
        if self._archive is not None:
            self._archive.sync()
        if self._tokens is not None:
            self._tokens.flush()
