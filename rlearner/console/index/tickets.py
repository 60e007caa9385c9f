"""Indexes the ledger's files: every line, and what became of each ticket."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from learner.credit import ledger_file
from learner.credit.ledger_file import FINAL, LedgerLine
from learner.credit.ledger_segments import FOLDER, SUFFIX
from rlearner.console.index import followed
from rlearner.console.index.followed import Line, Source
from rlearner.ops.showing import NO_RECORD
from rlearner.ops.tracing import ticket_summary

MALFORMED: Final = "malformed"


def update(connection: sqlite3.Connection, folder: Path) -> tuple[bool, set[int]]:
    """Read a few MB at most; return whether there may be more, and the tickets that changed."""
    sources = followed.sources_of(connection, "ledger")
    changed = set[int]()
    more = False
    files = _ledger_files(folder / FOLDER)
    for name in [name for name in sources if name not in files]:
        changed |= _cut_lines(connection, sources[name], 0)
        followed.forget(connection, sources[name])
    for name, first in files.items():
        file = followed.open_file(folder / FOLDER / name)
        # A learner that resumes has just deleted it.
        if file < 0:
            continue
        try:
            source = sources.get(name) or followed.begin(connection, "ledger", name, first)
            has_more, tickets = _read_lines(connection, file, source)
        finally:
            os.close(file)
        changed |= tickets
        more = more or has_more
        if more:
            break
    return more, changed


def _ledger_files(folder: Path) -> dict[str, int]:
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    files = {
        name: name.removeprefix("step-").removesuffix(SUFFIX)
        for name in names
        if name.endswith(SUFFIX)
    }
    numbers = {
        name: int(digits)
        for name, digits in files.items()
        if name.startswith("step-") and digits.isdecimal()
    }
    return dict(sorted(numbers.items(), key=lambda item: item[1]))


def _read_lines(connection: sqlite3.Connection, file: int, source: Source) -> tuple[bool, set[int]]:
    status = os.fstat(file)
    changed = set[int]()
    if source.is_as_seen(status):
        return False, changed
    if not source.has_only_grown(file, status):
        rows = connection.execute(
            "SELECT end, crc FROM ledger_lines WHERE source = ? ORDER BY end", (source.id,)
        )
        source.offset = followed.same_lines(file, rows)
        changed |= _cut_lines(connection, source, source.offset)
    last = connection.execute(
        "SELECT crc FROM ledger_lines WHERE source = ? ORDER BY end DESC LIMIT 1", (source.id,)
    ).fetchone()
    lines = list(followed.next_lines(file, source.offset, last[0] if last else 0))
    rows_of = [_ticket_row(source, line) for line in lines]
    connection.executemany("INSERT INTO ledger_lines VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", rows_of)
    changed.update(int(row[4]) for row in rows_of if row[4])
    if lines:
        source.offset = lines[-1].end
    if any(row[5] == MALFORMED for row in rows_of):
        _count_malformed(connection, source)
    more = bool(lines) and source.offset < status.st_size
    source.note(file, status, more=more)
    followed.save(connection, source)
    return more, changed


def _ticket_row(source: Source, line: Line) -> tuple[int, int, int, int, int, str, int, int, bytes]:
    head = (source.id, line.end, line.crc, source.first)
    try:
        record = ledger_file.decode_line(line.data)
        if max(record.ticket, record.seq, abs(record.step)) >= 2**63:
            raise ValueError("out of range")
    except ValueError:
        return *head, 0, MALFORMED, 0, -1, line.data
    ticket = (
        max(record.ticket, 0)
        if record.state not in ("boundary", "summary", "rules", "unrecorded")
        else 0
    )
    return *head, ticket, record.state, record.seq, record.step, line.data


def _cut_lines(connection: sqlite3.Connection, source: Source, offset: int) -> set[int]:
    """Take back the lines behind a place, and return their tickets."""
    place = (source.id, offset)
    rows = connection.execute(
        "SELECT DISTINCT ticket FROM ledger_lines WHERE source = ? AND end > ? AND ticket > 0",
        place,
    ).fetchall()
    connection.execute("DELETE FROM ledger_lines WHERE source = ? AND end > ?", place)
    _count_malformed(connection, source)
    return {ticket for (ticket,) in rows}


def _count_malformed(connection: sqlite3.Connection, source: Source) -> None:
    own = (source.id, MALFORMED)
    wrong = connection.execute(
        "SELECT count(*) FROM ledger_lines WHERE source = ? AND state = ?", own
    ).fetchone()[0]
    source.problem = f"{FOLDER}/{source.name}: {wrong} lines cannot be read" if wrong else ""


def lines_of(connection: sqlite3.Connection, ticket: int) -> list[LedgerLine]:
    """Return the lines of a ticket, in their order."""
    # as the index says
    query = "SELECT body FROM ledger_lines WHERE ticket = ? AND ticket > 0 ORDER BY first, end"
    rows = connection.execute(query, (ticket,))
    return [ledger_file.decode_line(body) for (body,) in rows]


def record_of(lines: Iterable[LedgerLine]) -> int:
    """Return the sequence of the record that ended a ticket or arrived for it; 0 without one."""
    return next(
        (line.seq for line in reversed(list(lines)) if line.seq and line.state not in NO_RECORD), 0
    )


def judge(connection: sqlite3.Connection, tickets: Iterable[int]) -> None:
    """Compute again what became of some tickets and of the trajectories of their records."""
    for ticket in tickets:
        lines = lines_of(connection, ticket)
        if not lines:
            connection.execute("DELETE FROM tickets WHERE ticket = ?", (ticket,))
            connection.execute(
                "UPDATE trajectories SET state = 'arrived', step = 0 WHERE ticket = ?", (ticket,)
            )
            continue
        summary = ticket_summary(lines)
        values = [summary.get(name, -1) for name in ("task_index", "min_version")]
        versions = [summary.get(name, -1) for name in ("oldest_version", "newest_version")]
        head = (
            ticket,
            summary["state"],
            summary.get("domain", ""),
            *values,
            record_of(lines),
            summary.get("step", 0),
        )
        row = (*head, *versions, summary.get("reason", ""))
        connection.execute(
            "INSERT OR REPLACE INTO tickets VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", row
        )
        states = _record_states(lines)
        for (seq,) in connection.execute(
            "SELECT DISTINCT seq FROM trajectories WHERE ticket = ?", (ticket,)
        ).fetchall():
            state = (*states.get(seq, ("arrived", 0)), ticket, seq)
            connection.execute(
                "UPDATE trajectories SET state = ?, step = ? WHERE ticket = ? AND seq = ?", state
            )


def _record_states(lines: Iterable[LedgerLine]) -> dict[int, tuple[str, int]]:
    """Return (state, optimizer step or 0) of each record of a ticket, by sequence."""
    states: dict[int, tuple[str, int]] = {}
    for line in lines:
        if line.seq and line.state in (*FINAL, *NO_RECORD, "arrived", "lost"):
            states[line.seq] = line.state, line.step
    return states
