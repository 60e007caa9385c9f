"""Indexes the archive of consumed records: where each frame is, and the trajectories in it.

A file ends where the next one begins, as for ``learner.credit.archive.read_frames``: of two files
that hold the same record the newer one counts. A damaged frame hides the rest of its file.
"""

from __future__ import annotations

import os
import sqlite3
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from broker.contract import wire
from broker.contract.streams import SAMPLES
from broker.jetstream.bus import LogRecord
from broker.jetstream.delivery import decode_message
from learner.credit import archive
from learner.credit.ledger_file import digest_record
from rlearner.console.index import followed
from rlearner.console.index.followed import Source
from rlearner.console.index.texts import preview, searchable

NO_END: Final = 2**62
ROUND_BYTES: Final = 4 * 2**20  # read in one round
_TRAJECTORY: Final = (
    "INSERT INTO trajectories VALUES (?, ?, ?, ?, ?, ?, ?, ?, 0, 'arrived', ?, "
    "?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
)


def update(connection: sqlite3.Connection, folder: Path) -> tuple[bool, set[int]]:
    """Read a few MB at most; return whether there may be more, and the tickets that changed."""
    sources = followed.sources_of(connection, "frames")
    changed = set[int]()
    more = False
    files = _archive_files(folder / archive.FOLDER)
    for name in [name for name in sources if name not in files]:
        changed |= _cut_frames(connection, sources[name], 0, 0)
        followed.forget(connection, sources[name])
    for name, following in pairwise([*files, ""]):
        file = followed.open_file(folder / archive.FOLDER / name)
        if file < 0:
            continue
        try:
            source = sources.get(name) or followed.begin(connection, "frames", name, files[name])
            has_more, tickets = _read_frames(connection, file, source, files.get(following, NO_END))
        finally:
            os.close(file)
        changed |= tickets
        more = more or has_more
        if more:
            break
    return more, changed


def _archive_files(folder: Path) -> dict[str, int]:
    """Return the first sequence of each file by name, ascending."""
    return {path.name: first for first, path in archive.archive_files(folder) if first < NO_END}


def _read_frames(
    connection: sqlite3.Connection, file: int, source: Source, until: int
) -> tuple[bool, set[int]]:
    status = os.fstat(file)
    changed = set[int]()
    if source.is_as_seen(status) and source.until == until:
        return False, changed
    if not source.has_only_grown(file, status):
        changed |= _cut_frames(
            connection, source, _same_frames(connection, file, source, status.st_size), 0
        )
    if until < source.until:
        changed |= _cut_frames(connection, source, source.offset, until)
    source.until = until
    stop_at = source.offset + ROUND_BYTES
    source.problem = ""
    rows = _Rows(connection, source)
    while source.offset < min(status.st_size, stop_at):
        frame = _frame_at(file, source, status.st_size, is_last=until == NO_END)
        if frame is None or frame.seq >= until:
            break
        changed.add(rows.add(frame))
        source.offset += archive.HEADER_BYTES + len(frame.data)
    rows.store()
    more = stop_at <= source.offset < status.st_size
    source.note(file, status, more=more)
    followed.save(connection, source)
    return more, changed


@dataclass(frozen=True)
class _Frame:
    seq: int
    ticket: int
    data: bytes
    check: bytes


def _frame_at(file: int, source: Source, size: int, *, is_last: bool) -> _Frame | None:
    """Return the frame at the place up to which a file was read; None if there is none, with a
    reason if it is bad.
    """
    place = source.offset
    header = archive.read_header(os.pread(file, archive.HEADER_BYTES, place))
    remaining = size - place - archive.HEADER_BYTES
    if header is None or header[2] > remaining:
        if not is_last or (header is None and remaining >= 0):
            source.problem = f"{archive.FOLDER}/{source.name}: no frame at byte {place}"
        return None
    seq, ticket, length, check = header
    if not place and seq != source.first:
        source.problem = f"{archive.FOLDER}/{source.name}: begins with record {seq}"
        return None
    data = os.pread(file, length, place + archive.HEADER_BYTES)
    if bytes.fromhex(digest_record(data)) != check:
        source.problem = f"{archive.FOLDER}/{source.name}: the bytes of record {seq} are damaged"
        return None
    return _Frame(seq, ticket, data, check)


def _same_frames(connection: sqlite3.Connection, file: int, source: Source, size: int) -> int:
    """Return the end of the last indexed frame of a file up to which its bytes are as they were."""
    rows = connection.execute(
        "SELECT offset, seq, length, digest FROM frames WHERE source = ? ORDER BY offset",
        (source.id,),
    )
    end = 0
    for offset, seq, length, check in rows:
        behind = offset + archive.HEADER_BYTES + length
        header = archive.read_header(os.pread(file, archive.HEADER_BYTES, offset))
        if (
            behind > size
            or header is None
            or (header[0], header[2], header[3]) != (seq, length, check)
        ):
            break
        if (
            bytes.fromhex(digest_record(os.pread(file, length, offset + archive.HEADER_BYTES)))
            != check
        ):
            break
        end = behind
    return end


def _cut_frames(
    connection: sqlite3.Connection, source: Source, offset: int, until: int
) -> set[int]:
    """Take back frames from a place on, or those from a sequence on, and return their tickets."""
    if until:
        row = connection.execute(
            "SELECT min(offset) FROM frames WHERE source = ? AND seq >= ?", (source.id, until)
        ).fetchone()
        offset = row[0] if row[0] is not None else offset
    place = (source.id, offset)
    rows = connection.execute(
        "SELECT DISTINCT ticket FROM frames WHERE source = ? AND offset >= ?", place
    ).fetchall()
    own = "SELECT id FROM groups WHERE source = ? AND offset >= ?"
    num_deleted = connection.execute(
        f"DELETE FROM trajectories WHERE grp IN ({own})", place
    ).rowcount
    _count_trajectories(connection, -num_deleted)
    connection.execute("DELETE FROM groups WHERE source = ? AND offset >= ?", place)
    connection.execute("DELETE FROM frames WHERE source = ? AND offset >= ?", place)
    source.offset = min(source.offset, offset)
    return {ticket for (ticket,) in rows}


def _count_trajectories(connection: sqlite3.Connection, more: int) -> None:
    """Keep the number of trajectories, which would take long to count each time it is shown."""
    if more:
        connection.execute("UPDATE meta SET value = value + ? WHERE name = 'trajectories'", (more,))


class _Rows:
    """What one round adds; stored table by table, which takes half the time of row by row."""

    def __init__(self, connection: sqlite3.Connection, source: Source) -> None:
        self._connection = connection
        self._source = source
        numbers = dict(connection.execute("SELECT name, seq FROM sqlite_sequence").fetchall())
        # Numbers of the newest rows; sqlite gives deleted ones to no other row (AUTOINCREMENT).
        self._group = int(numbers.get("groups", 0))
        self._trajectory = int(numbers.get("trajectories", 0))
        self._frames: list[tuple[Any, ...]] = []
        self._groups: list[tuple[Any, ...]] = []
        self._trajectories: list[tuple[Any, ...]] = []
        self._prompts: list[tuple[int, str]] = []
        self._responses: list[tuple[int, str]] = []

    def add(self, frame: _Frame) -> int:
        """Add one record at the source's offset, and return its ticket."""
        message, _ = decode_message(frame.data, SAMPLES.messages)
        kind = type(message).__name__ if message is not None else "malformed"
        epoch = message.epoch if isinstance(message, wire.RulesChange) else 0
        ticket = message.ticket if isinstance(message, wire.Group | wire.Closed) else frame.ticket
        head = (self._source.id, self._source.offset, frame.seq, ticket)
        self._frames.append((*head, len(frame.data), frame.check, kind, epoch))
        if isinstance(message, wire.Group):
            self._add_group(head, message)
        return ticket

    def _add_group(self, place: tuple[int, int, int, int], group: wire.Group) -> None:
        self._group += 1
        self._groups.append((self._group, *place, group.hub, preview(group.prompt)))
        if prompt_text := "\n".join(filter(None, (group.prompt, group.reference))):
            self._prompts.append((self._group, searchable(prompt_text)))
        for ordinal, trajectory in enumerate(group.trajectories):
            self._trajectory += 1
            head = (self._trajectory, self._group, place[2], ordinal, group.ticket)
            self._trajectories.append(
                (
                    *head,
                    trajectory.episode,
                    group.domain,
                    group.task_index,
                    *_trajectory_figures(trajectory),
                )
            )
            if trajectory.response:
                self._responses.append((self._trajectory, searchable(trajectory.response)))

    def store(self) -> None:
        connection = self._connection
        connection.executemany("INSERT INTO frames VALUES (?, ?, ?, ?, ?, ?, ?, ?)", self._frames)
        connection.executemany("INSERT INTO groups VALUES (?, ?, ?, ?, ?, ?, ?)", self._groups)
        connection.executemany(_TRAJECTORY, self._trajectories)
        _count_trajectories(connection, len(self._trajectories))
        connection.executemany(
            "INSERT INTO prompt_texts (rowid, text) VALUES (?, ?)", self._prompts
        )
        connection.executemany(
            "INSERT INTO response_texts (rowid, text) VALUES (?, ?)", self._responses
        )


def _trajectory_figures(trajectory: wire.Trajectory) -> tuple[Any, ...]:
    runs = wire.growable_array(trajectory.version_runs)
    versions = [
        version for version, length in zip(runs[::2], runs[1::2], strict=True) if length > 0
    ] or [-1]
    mask = trajectory.loss_mask.data
    sizes = (len(mask), mask.count(1), len(trajectory.turns))
    servers = " ".join(dict.fromkeys(turn.server for turn in trajectory.turns))
    head = (
        trajectory.reward,
        trajectory.success,
        trajectory.end,
        *sizes,
        min(versions),
        max(versions),
    )
    return *head, servers, trajectory.greedy, preview(trajectory.response)


def read_record(connection: sqlite3.Connection, folder: Path, seq: int) -> LogRecord | None:
    """Return an archived record, None if it is not there or damaged."""
    place = connection.execute(
        "SELECT s.name, f.offset, f.length, f.digest, f.ticket FROM frames f JOIN sources s ON "
        "s.id = f.source"
        " WHERE f.seq = ? ORDER BY s.first DESC LIMIT 1",
        (seq,),
    ).fetchone()
    if place is None:
        return None
    name, offset, length, check, ticket = place
    try:
        file = os.open(folder / archive.FOLDER / name, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        data = os.pread(file, length, offset + archive.HEADER_BYTES)
    finally:
        os.close(file)
    # Cut or written again since it was indexed.
    if bytes.fromhex(digest_record(data)) != check:
        return None
    message, error = decode_message(data, SAMPLES.messages)
    return LogRecord(seq, message, error, ticket, data)
