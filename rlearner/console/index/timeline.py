"""Queries of spans."""

from __future__ import annotations

import sqlite3

from rlearner.console.index.answers import Span, Timeline

LEARNER = "learner.learner"


def extent(connection: sqlite3.Connection) -> tuple[float, float]:
    row = connection.execute("SELECT min(time - coalesce(wall, 0)), max(time) FROM steps WHERE step >= 0").fetchone()
    return (float(row[0]), float(row[1])) if row[0] is not None else (0.0, 0.0)


def spans(connection: sqlite3.Connection, start: float, end: float, resolution_s: float, max_spans: int) -> Timeline:
    found: list[Span] = []
    for step, time, wall, train, offer in _phases(connection, start, end):
        offer, begin = min(offer, wall), time - wall
        train = min(train, wall - offer)
        for kind, first, last in (
            ("wait", begin, time - offer - train),
            ("train", time - offer - train, time - offer),
            ("weights", time - offer, time),
        ):
            if last > first:
                found.append(Span(LEARNER, kind, first, last, last - first, 1, 0, step))
    return Timeline(start, end, [LEARNER] if found else [], found)


def _phases(connection: sqlite3.Connection, start: float, end: float) -> list[tuple[int, float, float, float, float]]:
    return connection.execute(
        "SELECT step, time, coalesce(wall, 0), coalesce(train, 0), coalesce(offer, 0) FROM steps"
        " WHERE time >= ? AND time - coalesce(wall, 0) <= ? AND step >= 0 ORDER BY end",
        (start, end),
    ).fetchall()
