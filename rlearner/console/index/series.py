"""Queries of steps and metrics."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Final

from learner.reporting.metrics import label_name
from rlearner.console.index.answers import Series

MAX_STEP: Final = 2**62


def metric_names(connection: sqlite3.Connection, search: str, limit: int) -> list[str]:
    words = search.lower().split()
    names = [name for (name,) in connection.execute("SELECT name FROM metrics ORDER BY name")]
    matches = [name for name in names if all(word in name.lower() for word in words)]
    alive = (name for name in matches if connection.execute(_HAS_POINTS, (name,)).fetchone())
    return [name for name, _ in zip(alive, range(limit), strict=False)]


_OF: Final = (
    "FROM points WHERE metric = (SELECT id FROM metrics WHERE name = ?) AND step BETWEEN ? AND ?"
)
_HAS_POINTS: Final = (
    "SELECT 1 FROM points WHERE metric = (SELECT id FROM metrics WHERE name = ?) LIMIT 1"
)
_LAST: Final = (
    "SELECT name, (SELECT value FROM points WHERE metric = metrics.id ORDER BY step "
    "DESC LIMIT 1) FROM metrics"
)


def last_values(connection: sqlite3.Connection, names: Sequence[str]) -> dict[str, float]:
    name_filter = f" WHERE name IN ({', '.join('?' * len(names))})" if names else ""
    rows = connection.execute(f"{_LAST}{name_filter} ORDER BY name", tuple(names)).fetchall()
    return {name: value for name, value in rows if value is not None}


def newest_rows(connection: sqlite3.Connection, count: int) -> list[dict[str, float]]:
    rows: dict[int, dict[str, float]] = {}
    for step, name, value in connection.execute(
        "SELECT p.step, m.name, p.value FROM metrics m JOIN points p ON p.metric = m.id"
        " WHERE p.step > (SELECT max(step) FROM steps) - ?",
        (count,),
    ):
        rows.setdefault(step, {"step": step})[name] = value
    return [rows[step] for step in sorted(rows)]


def series(
    connection: sqlite3.Connection,
    names: Sequence[str],
    max_points: int,
    first_step: int,
    last_step: int | None,
) -> dict[str, Series]:
    until = MAX_STEP if last_step is None else last_step
    times: dict[int, float] = {}
    series_by_name = {}
    for name in dict.fromkeys(names):
        points, means, total = _read_points(connection, name, first_step, until, max_points)
        if not points:
            continue
        if not times:
            times = dict(_all_points(connection, "time", first_step, until))
        steps = [step for step, _ in points]
        labels = _labels_of(connection, name, first_step, until)
        series_by_name[name] = Series(
            name,
            [labels.get(step, step) for step in steps],
            [times.get(step, 0.0) for step in steps],
            [value for _, value in points],
            total=total,
            means=means,
        )
    return series_by_name


def _read_points(
    connection: sqlite3.Connection, name: str, first: int, last: int, most: int
) -> tuple[list[tuple[int, float]], list[float], int]:
    """Return at most ``most`` points, the extremes of half as many ranges of steps, the mean of the
    range of each, and how many points there are in all. If all are returned, without means.
    """
    total, begin, end = connection.execute(
        f"SELECT count(*), min(step), max(step) {_OF}", (name, first, last)
    ).fetchone()
    if total <= max(2, most):
        return _all_points(connection, name, first, last), [], total
    width = -(-(end - begin + 1) // max(1, most // 2))
    # a column next to the only extreme of a query is of the row that has it
    rows = {
        (step, value): mean
        for extreme in ("min", "max")
        for step, value, mean in connection.execute(
            f"SELECT step, {extreme}(value), avg(value) {_OF} GROUP BY (step - ?) / ?",
            (name, first, last, begin, width),
        )
    }
    points = sorted(rows)
    return points, [rows[point] for point in points], total


def _all_points(
    connection: sqlite3.Connection, name: str, first: int, last: int
) -> list[tuple[int, float]]:
    return connection.execute(
        f"SELECT step, value {_OF} ORDER BY step", (name, first, last)
    ).fetchall()


def _labels_of(connection: sqlite3.Connection, name: str, first: int, last: int) -> dict[int, int]:
    """Return the step after which an evaluation began, by the step whose line has it."""
    label = label_name(name)
    if label == "step":
        return {}
    return {step: int(value) for step, value in _all_points(connection, label, first, last)}


def step_at(connection: sqlite3.Connection, time: float) -> int:
    row = connection.execute(
        "SELECT step FROM steps WHERE time <= ? AND step >= 0 ORDER BY time DESC, step DESC "
        "LIMIT 1",
        (time,),
    ).fetchone()
    return int(row[0]) if row else 0


def time_of(connection: sqlite3.Connection, step: int) -> float | None:
    row = connection.execute(
        "SELECT time FROM steps WHERE step = ? ORDER BY end DESC LIMIT 1", (step,)
    ).fetchone()
    return float(row[0]) if row else None
