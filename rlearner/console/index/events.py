"""Queries of events: noted ones, and the learner's starts, which follow from the ledger."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from learner.credit import ledger_file
from learner.reporting.starts import read_starts
from learner.resume_checks import format_change, setting_changes
from rlearner.console.index.answers import Event
from rlearner.console.index.series import step_at

MAX_CHANGES: Final = 3  # named in one line
EPOCH: Final = "epoch"


def events(
    connection: sqlite3.Connection,
    folder: Path,
    start: float | None,
    end: float | None,
    kinds: Sequence[str],
    newest: int,
) -> list[Event]:
    first = start if start is not None else 0.0
    last = end if end is not None else float("inf")
    kind_filter = f" AND kind IN ({', '.join('?' * len(kinds))})" if kinds else ""
    noted = connection.execute(
        f"SELECT time, step, kind, text, who FROM events WHERE time BETWEEN ? AND ?{kind_filter} "
        "ORDER BY time DESC LIMIT ?",
        (first, last, *kinds, newest),
    ).fetchall()
    events_list = [_noted_event(connection, *row) for row in noted]
    if not kinds or EPOCH in kinds:
        events_list += [
            event for event in _epoch_events(connection, folder) if first <= event.time <= last
        ]
    return sorted(events_list, key=lambda event: (event.time, event.step, event.kind, event.text))[
        -newest:
    ]


def _noted_event(
    connection: sqlite3.Connection, time: float, step: int, kind: str, text: str, who: str
) -> Event:
    return Event(time, step if step >= 0 else step_at(connection, time), kind, text, who)


def _epoch_events(connection: sqlite3.Connection, folder: Path) -> Iterator[Event]:
    """Yield an event for each record by which a learner set its rules when it started.

    Its text names the settings that changed: all that the learner noted, else those in the record.
    """
    noted = {start.get("epoch"): start.get("changes") for start in read_starts(folder)}
    old_rules = _first_rules(connection)
    number = 0
    for seq, body in connection.execute(
        "SELECT seq, body FROM ledger_lines WHERE state = 'rules' ORDER BY first, end"
    ):
        rules = ledger_file.decode_line(body).rules
        row = connection.execute(
            "SELECT epoch FROM frames WHERE seq = ? AND kind = 'RulesChange'", (seq,)
        ).fetchone()
        lines = (
            [format_change(change) for change in setting_changes(old_rules, rules)]
            if old_rules is not None
            else []
        )
        old_rules = rules
        # Records of a run without an archive have no epoch in the index, and come in order.
        number = number + 1
        lines = noted.get(row[0] if row else number) or lines
        more = [f"and {len(lines) - MAX_CHANGES} more"] if len(lines) > MAX_CHANGES else []
        settings = f": {', '.join([*lines[:MAX_CHANGES], *more])}" if lines else ""
        step, time = _epoch_place(connection, seq)
        text = f"learner started, epoch {row[0]}{settings}" if row else f"learner started{settings}"
        yield Event(time, step, EPOCH, text, "learner", approximate=True)


def _first_rules(connection: sqlite3.Connection) -> dict[str, Any] | None:
    """Return the rules that the run began with, None without a ledger."""
    row = connection.execute(
        "SELECT l.body FROM ledger_lines l JOIN sources s ON s.id = l.source"
        " WHERE s.kind = 'ledger' AND s.first = 0 AND l.state = 'summary' ORDER BY l.end LIMIT 1"
    ).fetchone()
    return ledger_file.decode_line(row[0]).rules if row else None


def _epoch_place(connection: sqlite3.Connection, seq: int) -> tuple[int, float]:
    """Return the steps completed at a record, and about when it was consumed."""
    row = connection.execute(
        "SELECT max(step) FROM ledger_lines WHERE ticket = 0 AND state IN ('boundary', "
        "'summary') AND seq < ?",
        (seq,),
    ).fetchone()
    step = int(row[0]) if row[0] is not None else 0
    for wanted_step, column in ((step + 1, "time - coalesce(wall, 0)"), (step, "time")):
        line = connection.execute(
            f"SELECT {column} FROM steps WHERE step = ? ORDER BY end DESC LIMIT 1", (wanted_step,)
        )
        if (place_row := line.fetchone()) is not None:
            return step, float(place_row[0])
    return step, 0.0
