"""Bounds the archive to the newest groups (``samples.keep: N``), by removing its oldest files.

``trim.json``, replaced durably before a file is removed, says from which record on the archive is
complete. So what a kill or power loss leaves, half of the files removed, is never taken for a loss.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import msgspec

from broker.jetstream.bus import LogRecord
from broker.system.private_files import private_write
from learner.credit.archive import (
    HEADER_BYTES,
    SampleArchive,
    archive_files,
    pause_marks,
    read_header,
)

FILE: Final = "trim.json"
# A file holds this share of the groups: the archive holds up to two files more than it must.
FILES: Final = 8


class ArchiveTrim(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was removed.

    Attributes:
        before: records before this sequence were removed; 0: none.
        keep: the number of groups that are kept.
    """

    before: int = 0
    keep: int = 0

    def __str__(self) -> str:
        groups = f"{self.keep} group{'s' * (self.keep != 1)}"
        return f"the archive keeps the newest {groups} (samples.keep)"


class BoundedArchive(SampleArchive):
    """Archive of at least the newest ``keep`` groups, and of at most ``max_groups(keep)``.

    A group is a ticket that has a record, scored or closed.
    """

    def __init__(self, folder: Path, position: int, max_file_bytes: int, keep: int) -> None:
        super().__init__(folder, position, max_file_bytes)
        self._keep = keep
        trim = read_trim(folder)
        if trim.before > position + 1:
            # The records from there on are consumed, and archived, again.
            _write_trim(folder, ArchiveTrim(position + 1, trim.keep))
        self._tickets: dict[int, set[int]] = {}  # by the first record of their file
        num_groups = 0
        for first, path in reversed(archive_files(folder)):
            self._tickets[first] = set()
            # Older files than needed are removed unread.
            if num_groups < keep:
                self._tickets[first] = _read_tickets(path)
                num_groups = len(set().union(*self._tickets.values()))
        self.trim()

    @property
    def is_full(self) -> bool:
        num_groups = len(self._tickets.get(self.first_seq, ()))
        return super().is_full or num_groups >= _groups_per_file(self._keep)

    def append(self, record: LogRecord, record_digest: str) -> None:
        if self.is_full:
            self.trim()
        super().append(record, record_digest)
        self._tickets.setdefault(self.first_seq, set()).update({record.ticket} - {0})

    def trim(self) -> None:
        """Remove the oldest files, while the others hold enough groups.

        Raises:
            OSError: if the folder cannot be written; call again.
        """
        groups: set[int] = set()
        kept_files: list[int] = []
        for first in sorted(self._tickets, reverse=True):
            if len(groups) >= self._keep:
                break
            groups |= self._tickets[first]
            kept_files.append(first)
        old_files = sorted(self._tickets.keys() - set(kept_files))
        if not old_files:
            return
        before = kept_files[-1]
        _write_trim(self._folder, ArchiveTrim(before, self._keep))
        marks = pause_marks(self._folder)
        paths = dict(archive_files(self._folder))
        # Oldest first: a kill leaves no gap.
        for first in old_files:
            if first in paths:
                paths[first].unlink(missing_ok=True)
            del self._tickets[first]
        for first, path in marks.items():
            if first < before:
                path.unlink(missing_ok=True)


def max_groups(keep: int) -> int:
    """Return the most groups in an archive of ``keep`` groups."""
    return keep + 2 * _groups_per_file(keep) - 1


def _groups_per_file(keep: int) -> int:
    return -(-keep // FILES)


def _read_tickets(path: Path) -> set[int]:
    """Return the tickets of a file's records by their headers."""
    tickets = set()
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        position = 0
        while header := read_header(os.pread(file.fileno(), HEADER_BYTES, position)):
            position += HEADER_BYTES + header[2]
            if position <= size:
                tickets.add(header[1])
    return tickets - {0}


def read_trim(folder: Path) -> ArchiveTrim:
    """Return what was removed from an archive."""
    try:
        return msgspec.json.decode((folder / FILE).read_bytes(), type=ArchiveTrim)
    except (OSError, msgspec.MsgspecError):
        return ArchiveTrim()


def missing_reason(folder: Path, seq: int) -> str:
    """Return, for a message, why a record is not in the archive."""
    trim = read_trim(folder)
    if seq < trim.before:
        return f"no longer there: {trim}"
    return "not in the archive (samples.keep)"


def _write_trim(folder: Path, trim: ArchiveTrim) -> None:
    private_write(folder / FILE, msgspec.json.encode(trim))
