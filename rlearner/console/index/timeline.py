"""Queries of spans: reported ones, and the learner's phases, from metrics.jsonl.

Where the learner's own reports were recorded they are shown; elsewhere each step's waiting,
training and offering of weights, one after the other at the end of the step, because the file has
only their sums.
"""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from broker.contract.streams import ROLES
from rlearner.console.index.answers import Timeline, TimelineSpan
from rlearner.console.index.live_spans import JOIN_UP_TO_S, WIDTHS, kept_since

LEARNER: Final = "learner.learner"
PHASES: Final = ("wait", "train", "weights")
MAX_KINDS: Final = 4  # of one process, to begin with
Floats = npt.NDArray[np.float64]


def extent(connection: sqlite3.Connection) -> tuple[float, float]:
    steps = connection.execute(
        "SELECT min(time - coalesce(wall, 0)), max(time) FROM steps WHERE step >= 0"
    ).fetchone()
    ends = list(steps) if steps[0] is not None else []
    if (since := _live_since(connection)) is not None:
        newest = connection.execute(
            "SELECT max(end) FROM (SELECT end FROM spans ORDER BY start DESC LIMIT 256)"
        )
        ends += [since, *(value for value in newest.fetchone() if value is not None)]
    return (min(ends), max(ends)) if ends else (0.0, 0.0)


def spans(
    connection: sqlite3.Connection, start: float, end: float, resolution_s: float, max_spans: int
) -> Timeline:
    phases = _read_phases(connection, start, end)
    width = 0.0
    timeline_spans = None
    if start >= kept_since(connection, 0):
        timeline_spans = _single_spans(
            connection, start, end, max_spans - len(PHASES) * len(phases)
        )
    if timeline_spans is None:
        width, timeline_spans = _added_up(
            connection, phases, start, end=end, resolution_s=resolution_s, max_spans=max_spans
        )
    else:
        timeline_spans += _phase_spans(
            phases, [span for span in timeline_spans if span.lane == LEARNER]
        )
    lanes = sorted({span.lane for span in timeline_spans}, key=_lane_order)
    return Timeline(
        start,
        end,
        lanes,
        spans=timeline_spans,
        bucket_s=width,
        live_since=_live_since(connection) or 0.0,
    )


def _live_since(connection: sqlite3.Connection) -> float | None:
    """Return since when there are reports, in seconds; None without reports."""
    row = connection.execute("SELECT min(start) FROM spans").fetchone()
    if not kept_since(connection, 0):
        return None if row[0] is None else float(row[0])
    for width in WIDTHS:
        if not kept_since(connection, width):
            break
    row = connection.execute(
        "SELECT min(bucket) * width FROM buckets WHERE width = ?", (width,)
    ).fetchone()
    return None if row[0] is None else float(row[0])


def _lane_order(lane: str) -> tuple[int, str]:
    role = lane.partition(".")[0]
    return (ROLES.index(role) if role in ROLES else len(ROLES)), lane


# -------------------------------------------------------------------------------------------------
# single spans


def _single_spans(
    connection: sqlite3.Connection, start: float, end: float, most: int
) -> list[TimelineSpan] | None:
    """Return the reported spans of a range, None if there are more than ``most``."""
    rows = connection.execute(
        "SELECT l.name, s.kind, s.start, s.end, s.seconds, s.count, s.ticket, s.step, s.sample"
        " FROM spans s JOIN lanes l ON l.id = s.lane WHERE s.start BETWEEN ? AND ? AND s.end >= ?"
        " ORDER BY s.start LIMIT ?",
        (start - JOIN_UP_TO_S, end, start, max(most, 0) + 1),
    ).fetchall()
    return [_span_of_row(row) for row in rows] if len(rows) <= most else None


def _span_of_row(row: Sequence[Any]) -> TimelineSpan:
    lane, kind, start, end, seconds, count, ticket, step, sample = row
    return TimelineSpan(
        lane,
        kind,
        start,
        end=end,
        seconds=seconds,
        count=count,
        ticket=ticket,
        step=step,
        sample=bool(sample),
    )


def _read_phases(
    connection: sqlite3.Connection, start: float, end: float
) -> list[tuple[int, float, float, float, float]]:
    """Return (step, end, length, training, offering), in seconds, of the steps in a range."""
    return connection.execute(
        "SELECT step, time, coalesce(wall, 0), coalesce(train, 0), coalesce(offer, 0) FROM steps"
        " WHERE time >= ? AND time - coalesce(wall, 0) <= ? AND step >= 0 ORDER BY time",
        (start, end),
    ).fetchall()


def _phase_spans(
    phases: Sequence[tuple[int, float, float, float, float]], reported: Sequence[TimelineSpan]
) -> list[TimelineSpan]:
    """Return the phases of the steps of which the learner reported nothing."""
    begins = np.array([span.start for span in reported])
    ends = np.maximum.accumulate([span.end for span in reported] or np.zeros(0))
    phase_spans = []
    for step, time, wall, train, offer in phases:
        middle = time - wall / 2
        index = int(np.searchsorted(begins, middle, side="right")) - 1
        if index >= 0 and ends[index] >= middle:
            continue
        edges = _phase_edges(time, wall, train, offer)
        for kind, first, last in zip(PHASES, edges, edges[1:], strict=False):
            if last > first:
                phase_spans.append(
                    TimelineSpan(
                        LEARNER,
                        kind,
                        float(first),
                        end=float(last),
                        seconds=float(last - first),
                        step=step,
                    )
                )
    return phase_spans


def _phase_edges(time: Any, wall: Any, train: Any, offer: Any) -> list[Any]:
    """Return begin of waiting, training and offering, and the end of a step (or arrays)."""
    offer = np.minimum(offer, wall)
    train = np.minimum(train, wall - offer)
    return [time - wall, time - offer - train, time - offer, time]


# -------------------------------------------------------------------------------------------------
# buckets


def _added_up(
    connection: sqlite3.Connection,
    phases: Sequence[tuple[int, float, float, float, float]],
    start: float,
    end: float,
    resolution_s: float,
    max_spans: int,
) -> tuple[float, list[TimelineSpan]]:
    """Return the width of the buckets, and at most ``max_spans`` of them."""
    length = max(end - start, 1e-3)
    width_s = max(resolution_s, length * MAX_KINDS / max_spans)
    while True:
        bucket_width = _bucket_width(connection, width_s, start)
        width = (
            width_s
            if bucket_width is None
            else max(1, math.ceil(width_s / bucket_width)) * bucket_width
        )
        buckets = (
            _reported_buckets(connection, start, end, bucket_width, width) if bucket_width else []
        )
        buckets += _phase_buckets(
            phases, start, end, width, {span.start for span in buckets if span.lane == LEARNER}
        )
        if len(buckets) <= max_spans or width >= length:
            return width, buckets
        width_s = max(width_s, width) * max(1.2, len(buckets) / max_spans)


def _bucket_width(connection: sqlite3.Connection, width_s: float, start: float) -> int | None:
    """Return the widest buckets of at most half the wanted width that are kept from the start on;
    None: there are none.

    The narrowest of those that are kept if all are wider.
    """
    if connection.execute("SELECT 1 FROM buckets LIMIT 1").fetchone() is None:
        return None
    widths = [width for width in WIDTHS if kept_since(connection, width) <= start] or [WIDTHS[-1]]
    return max([width for width in widths if width <= width_s / 2], default=widths[0])


def _reported_buckets(
    connection: sqlite3.Connection, start: float, end: float, level: int, width: float
) -> list[TimelineSpan]:
    rows = connection.execute(
        "SELECT l.name, b.kind, (b.bucket * b.width) / ? AS wide, sum(b.seconds), sum(b.count)"
        " FROM buckets b JOIN lanes l ON l.id = b.lane WHERE b.width = ? AND b.bucket BETWEEN ? "
        "AND ?"
        " GROUP BY b.lane, b.kind, wide ORDER BY wide",
        (int(width), level, math.floor(start / level), math.floor(end / level)),
    )
    return [
        TimelineSpan(lane, kind, wide * width, end=(wide + 1) * width, seconds=seconds, count=count)
        for lane, kind, wide, seconds, count in rows
    ]


def _phase_buckets(
    phases: Sequence[tuple[int, float, float, float, float]],
    start: float,
    end: float,
    width: float,
    reported_starts: set[float],
) -> list[TimelineSpan]:
    """Return the learner's phases in buckets, except in those where it reported itself."""
    if not phases:
        return []
    _, *columns = np.array(phases).T
    begins = np.arange(math.floor(start / width), math.floor(end / width) + 1) * width
    grid = np.append(begins, begins[-1] + width)
    edges = _phase_edges(*columns)
    buckets = []
    for kind, first, last in zip(PHASES, edges, edges[1:], strict=False):
        busy = np.diff(_busy_integral(first, last, grid))
        num_ended = np.diff(np.searchsorted(np.sort(last), grid))
        for begin, seconds, count in zip(
            begins.tolist(), busy.tolist(), num_ended.tolist(), strict=True
        ):
            if seconds > 0 and begin not in reported_starts:
                buckets.append(
                    TimelineSpan(
                        LEARNER, kind, begin, end=begin + width, seconds=seconds, count=count
                    )
                )
    return buckets


def _busy_integral(first: Floats, last: Floats, at: Floats) -> Floats:
    """Return the seconds of some intervals, ascending and disjoint, that lie before each time."""
    points = np.maximum.accumulate(np.column_stack([first, last]).ravel())
    lengths = np.diff(points, prepend=points[0])
    lengths[::2] = 0.0  # between two intervals
    integral: Floats = np.interp(at, points, np.cumsum(lengths))
    return integral
