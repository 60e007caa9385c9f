"""Indexes metrics.jsonl: every number of every step."""

from __future__ import annotations

import json
import math
import os
import sqlite3
from pathlib import Path
from typing import Any, Final

from rlearner.console.index import followed
from rlearner.console.index.followed import Line, Source

FILE: Final = "metrics.jsonl"
PHASES: Final = ("time/step", "time/train", "time/offer_weights")  # seconds, for the learner's lane


class StepsReader:
    """Reader of metrics.jsonl. If a step has several lines, the last one counts."""

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}

    def forget_names(self) -> None:
        """Forget what a transaction that was rolled back may have stored."""
        self._ids.clear()

    def update(self, connection: sqlite3.Connection, folder: Path) -> bool:
        """Read what is new, at most a few MB; return whether there may be more."""
        source = followed.sources_of(connection, "steps").get(FILE)
        file = followed.open_file(folder / FILE)
        if file < 0:
            if source is not None:
                self._cut(connection, file, 0)
                followed.forget(connection, source)
            return False
        try:
            return self._read(connection, file, source or followed.begin(connection, "steps", FILE))
        finally:
            os.close(file)

    def _read(self, connection: sqlite3.Connection, file: int, source: Source) -> bool:
        status = os.fstat(file)
        if source.is_as_seen(status):
            return False
        if not source.has_only_grown(file, status):
            ends = connection.execute("SELECT end, crc FROM steps ORDER BY end")
            source.offset = followed.same_lines(file, ends)
            self._cut(connection, file, source.offset)
        last = connection.execute("SELECT crc FROM steps ORDER BY end DESC LIMIT 1").fetchone()
        lines = list(followed.next_lines(file, source.offset, last[0] if last else 0))
        self._add(connection, lines)
        if lines:
            source.offset = lines[-1].end
        more = bool(lines) and source.offset < status.st_size
        source.note(file, status, more=more)
        wrong = connection.execute(
            "SELECT count(*), min(start) FROM steps WHERE step < 0"
        ).fetchone()
        source.problem = (
            f"{FILE}: {wrong[0]} lines cannot be read, the first at byte {wrong[1]}"
            if wrong[0]
            else ""
        )
        followed.save(connection, source)
        return more

    def _add(self, connection: sqlite3.Connection, lines: list[Line]) -> None:
        steps = []
        newest = dict[int, dict[str, float]]()
        for line in lines:
            values = values_of(line.data)
            step = int(values.pop("step")) if values else -1
            phases = [values.get(name) for name in PHASES]
            steps.append((line.end, line.start, line.crc, step, values.get("time", 0.0), *phases))
            if step >= 0:
                newest[step] = values
        newest_step = connection.execute("SELECT max(step) FROM steps").fetchone()[0]
        self._drop(
            connection, [step for step in newest if newest_step is not None and step <= newest_step]
        )
        connection.executemany("INSERT INTO steps VALUES (?, ?, ?, ?, ?, ?, ?, ?)", steps)
        for step, values in newest.items():
            self._store(connection, step, values)

    def _store(self, connection: sqlite3.Connection, step: int, values: dict[str, float]) -> None:
        rows = [(self._id(connection, name), step, value) for name, value in values.items()]
        connection.executemany("INSERT INTO points VALUES (?, ?, ?)", rows)

    def _drop(self, connection: sqlite3.Connection, steps: list[int]) -> None:
        for step in steps:
            connection.execute(
                "DELETE FROM points WHERE metric IN (SELECT id FROM metrics) AND step = ?", (step,)
            )

    def _cut(self, connection: sqlite3.Connection, file: int, offset: int) -> None:
        """Take back the lines behind a place; an earlier line of the same step counts again."""
        bounds = connection.execute(
            "SELECT DISTINCT step FROM steps WHERE end > ? AND step >= 0", (offset,)
        ).fetchall()
        connection.execute("DELETE FROM steps WHERE end > ?", (offset,))
        if not offset:
            connection.execute("DELETE FROM points")
            return
        self._drop(connection, [step for (step,) in bounds])
        for (step,) in bounds:
            place = connection.execute(
                "SELECT start, end FROM steps WHERE step = ? ORDER BY end DESC LIMIT 1", (step,)
            )
            if (row := place.fetchone()) is not None:
                values = values_of(os.pread(file, row[1] - row[0], row[0]))
                self._store(
                    connection,
                    step,
                    {name: value for name, value in values.items() if name != "step"},
                )

    def _id(self, connection: sqlite3.Connection, name: str) -> int:
        if name not in self._ids:
            connection.execute("INSERT OR IGNORE INTO metrics (name) VALUES (?)", (name,))
            row = connection.execute("SELECT id FROM metrics WHERE name = ?", (name,)).fetchone()
            self._ids[name] = int(row[0])
        return self._ids[name]


def values_of(data: bytes) -> dict[str, float]:
    """Return the finite numbers of a line, with its ``step``; empty if it cannot be read."""
    try:
        row: Any = json.loads(data)
        if (
            not isinstance(row, dict)
            or not isinstance(row["step"], int)
            or not 0 <= row["step"] < 2**53
        ):
            return {}
    except (ValueError, KeyError, RecursionError):
        return {}
    numbers = {name: value for name, value in row.items() if type(value) in (int, float)}
    return {
        name: float(value)
        for name, value in numbers.items()
        if abs(value) < 1e300 and math.isfinite(value)
    }
