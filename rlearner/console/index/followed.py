"""Follows files that grow, are cut, are replaced under the same name, or vanish.

How far a file was read is kept with its inode and a checksum of the last bytes before that place. A
learner that resumes continues ``metrics.jsonl`` and the ledger in a copy under the same name: of
such a file the checksums of all lines are compared, and only what differs is read again.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Final
from zlib import crc32

GUARD_BYTES: Final = 2**16
READ_BYTES: Final = 2**20  # per round, so that a long file does not hold up the others


@dataclass
class Source:
    """Row of the table ``sources``; ``first`` orders the files of a kind."""

    id: int
    kind: str
    name: str
    first: int = 0
    ino: int = 0
    size: int = 0
    mtime: int = 0
    offset: int = 0
    guard_at: int = 0
    guard: int = 0
    until: int = 0
    whole: int = 0
    problem: str = ""

    def is_as_seen(self, status: os.stat_result) -> bool:
        """Return whether it was read as far as possible, and nothing was written since."""
        is_same = (self.ino, self.size, self.mtime) == (
            status.st_ino,
            status.st_size,
            status.st_mtime_ns,
        )
        return bool(self.whole) and is_same

    def has_only_grown(self, file: int, status: os.stat_result) -> bool:
        """Return whether what was read is still at its place."""
        if self.ino != status.st_ino or status.st_size < max(self.offset, self.size):
            return False
        if status.st_size == self.size and status.st_mtime_ns != self.mtime:
            return False  # written in place
        return crc32(os.pread(file, self.offset - self.guard_at, self.guard_at)) == self.guard

    def note(self, file: int, status: os.stat_result, *, more: bool) -> None:
        """Remember the file as it is, read up to ``offset``, behind which there may be ``more``."""
        self.ino = status.st_ino
        self.size = status.st_size
        self.mtime = status.st_mtime_ns
        self.whole = not more
        self.guard_at = max(0, self.offset - GUARD_BYTES)
        self.guard = crc32(os.pread(file, self.offset - self.guard_at, self.guard_at))


_COLUMNS: Final = tuple(field.name for field in fields(Source))


def sources_of(connection: sqlite3.Connection, kind: str) -> dict[str, Source]:
    """Return the followed files of a kind by name, in their order."""
    rows = connection.execute(
        f"SELECT {', '.join(_COLUMNS)} FROM sources WHERE kind = ? ORDER BY first, name", (kind,)
    )
    return {row[2]: Source(*row) for row in rows}


def begin(connection: sqlite3.Connection, kind: str, name: str, first: int = 0) -> Source:
    row = connection.execute(
        "INSERT INTO sources (kind, name, first) VALUES (?, ?, ?)", (kind, name, first)
    )
    return Source(int(row.lastrowid or 0), kind, name, first)


def save(connection: sqlite3.Connection, source: Source) -> None:
    """Store how far a file was read."""
    assignments = ", ".join(f"{name} = ?" for name in _COLUMNS[3:])
    values = [getattr(source, name) for name in _COLUMNS[3:]]
    connection.execute(f"UPDATE sources SET {assignments} WHERE id = ?", (*values, source.id))


def forget(connection: sqlite3.Connection, source: Source) -> None:
    """Stop following a file; the caller has removed what came from it."""
    connection.execute("DELETE FROM sources WHERE id = ?", (source.id,))


@dataclass(frozen=True)
class Line:
    """A complete line without its newline; ``crc``: checksum of the file up to ``end``."""

    start: int
    end: int
    crc: int
    data: bytes


def open_file(path: Path) -> int:
    """Open a file for reading, -1 if it is not there."""
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return -1


def same_lines(file: int, ends: Iterable[tuple[int, int]]) -> int:
    """Return the end of the last line up to which a file is unchanged, 0 without one.

    Args:
        ends: (end, checksum) of every line, ascending.
    """
    position = crc = 0
    buffer = b""
    begin = 0
    for end, expected_digest in ends:
        while begin + len(buffer) < end:
            more = os.pread(file, max(READ_BYTES, end - begin - len(buffer)), begin + len(buffer))
            if not more:
                return position
            buffer = buffer[position - begin :] + more
            begin = position
        crc = crc32(buffer[position - begin : end - begin], crc)
        if crc != expected_digest:
            return position
        position = end
    return position


def next_lines(file: int, offset: int, crc: int) -> Iterator[Line]:
    """Yield the complete lines from a place on: about ``READ_BYTES``, at least one."""
    buffer = b""
    num_bytes = READ_BYTES
    while b"\n" not in buffer:
        more = os.pread(file, num_bytes, offset + len(buffer))
        if not more:
            return
        buffer += more
    for data in buffer[: buffer.rindex(b"\n")].split(b"\n"):
        end = offset + len(data) + 1
        crc = crc32(b"\n", crc32(data, crc))
        yield Line(offset, end, crc, data)
        offset = end
