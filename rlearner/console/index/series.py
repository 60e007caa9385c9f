"""Queries of steps and metrics."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from rlearner.console.index.answers import Series

MAX_STEP: Final = 2**62


def metric_names(connection: sqlite3.Connection, search: str, limit: int) -> list[str]:
    words = search.lower().split()
    names = [name for (name,) in connection.execute("SELECT name FROM metrics ORDER BY name")]
    found = [name for name in names if all(word in name.lower() for word in words)]
    alive = (name for name in found if connection.execute(_ANY, (name,)).fetchone())
    return [name for name, _ in zip(alive, range(limit), strict=False)]


_ANY = "SELECT 1 FROM points WHERE metric = (SELECT id FROM metrics WHERE name = ?) LIMIT 1"
_LAST = (
    "SELECT name, (SELECT value FROM points WHERE metric = metrics.id ORDER BY step DESC LIMIT 1) FROM metrics"
    " ORDER BY name"
)


def last_values(connection: sqlite3.Connection, names: Sequence[str]) -> dict[str, float]:
    found = dict(connection.execute(_LAST).fetchall())
    return {name: value for name, value in found.items() if value is not None and (not names or name in names)}


def series(
    connection: sqlite3.Connection, names: Sequence[str], max_points: int, first_step: int, last_step: int | None
) -> dict[str, Series]:
    until = MAX_STEP if last_step is None else last_step
    time_steps, times = _points(connection, "time", first_step, until)
    found = {}
    for name in dict.fromkeys(names):
        steps, values = _points(connection, name, first_step, until)
        if not len(steps):
            continue
        kept = extremes(values, max_points)
        chosen = steps[kept]
        written = np.zeros(len(chosen))
        if len(times):
            at = np.searchsorted(time_steps, chosen).clip(0, len(times) - 1)
            written = np.where(time_steps[at] == chosen, times[at], 0.0)
        found[name] = Series(name, chosen.tolist(), written.tolist(), values[kept].tolist(), len(steps))
    return found


def extremes(values: npt.NDArray[np.float64], max_points: int) -> npt.NDArray[np.int64]:
    """Return the positions of the lowest and the highest value of each of ``max_points // 2`` buckets, ascending."""
    n, buckets = len(values), max(1, max_points // 2)
    if n <= max(2, max_points):
        return np.arange(n)
    edges = np.linspace(0, n, buckets + 1).astype(np.int64)
    kept = set[int]()
    for start, end in pairwise(edges.tolist()):
        part = values[start:end]
        kept |= {start + int(part.argmin()), start + int(part.argmax())}
    return np.array(sorted(kept), dtype=np.int64)


def _points(
    connection: sqlite3.Connection, name: str, first: int, last: int
) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    rows = connection.execute(
        "SELECT step, value FROM points WHERE metric = (SELECT id FROM metrics WHERE name = ?)"
        " AND step BETWEEN ? AND ? ORDER BY step",
        (name, first, last),
    ).fetchall()
    if not rows:
        return np.zeros(0, np.int64), np.zeros(0)
    both = np.array(rows)
    return both[:, 0].astype(np.int64), both[:, 1]


def step_at(connection: sqlite3.Connection, time: float) -> int:
    row = connection.execute(
        "SELECT step FROM steps WHERE time <= ? AND step >= 0 ORDER BY time DESC, step DESC LIMIT 1", (time,)
    ).fetchone()
    return int(row[0]) if row else 0


def time_of(connection: sqlite3.Connection, step: int) -> float | None:
    row = connection.execute("SELECT time FROM steps WHERE step = ? ORDER BY end DESC LIMIT 1", (step,)).fetchone()
    return float(row[0]) if row else None
