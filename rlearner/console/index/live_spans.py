"""Records reported spans: single ones for a while, sums in buckets for the whole run.

Kept are the newest single spans and the newest buckets of each width, a bounded number of rows
however long the run.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from broker.contract import wire

WIDTHS: Final = (8, 64, 512, 4096)  # seconds of the buckets
MAX_ROWS: Final = 400_000  # single spans, and buckets of each width
MAX_EVENTS: Final = 20_000  # of processes
FLUSH_S: Final = 2.0
PRUNE_EVERY: Final = 200  # flushes
# Reports between two flushes; further ones are lost.
MAX_PENDING: Final = 5_000
MAX_LANES: Final = 4096
# Work without a break whose reports touch is one span.
JOIN_GAP_S: Final = 0.1
# the longest such span, so that a range of time finds those that reach into it
JOIN_UP_TO_S: Final = 60.0
# Share by which busy time and length may differ in it.
SOLID: Final = 0.02
_OLDEST: Final = "SELECT bucket FROM buckets WHERE width = ? ORDER BY bucket"
# A process that says nothing for so long has left.
SILENT_S: Final = 15.0
# A report so little older than the newest was recorded by another console.
AGAIN_S: Final = 60.0
# before and after now; a span outside is of a clock that is wrong
PLAUSIBLE_S: Final = (86_400.0, 3_600.0)


@dataclass(frozen=True)
class _Report:
    lane: str
    time: float
    spans: list[wire.Span]


@dataclass(frozen=True)
class _LiveEvent:
    time: float
    step: int
    kind: str
    text: str
    who: str


@dataclass
class _Seen:
    at: float
    failure: str


class LiveSpans:
    """What arrived and is not in the database yet; ``add`` may be called from any thread.

    Args:
        clock: seconds since 1970.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._pending: list[_Report] = []
        self._events: list[_LiveEvent] = []
        self._seen: dict[str, _Seen] = {}
        self._listening_since: float | None = None
        self._step = -1
        self._flushed = 0.0
        self._flushes = 0
        # Spans that were not recorded.
        self.lost = 0

    def add(self, metrics: wire.Metrics) -> None:
        """Take the metrics of a process."""
        now = self._clock()
        lane = f"{metrics.role}.{metrics.id}"
        most_past_s, most_ahead_s = PLAUSIBLE_S
        good = [
            span
            for span in metrics.spans
            if now - most_past_s <= span.start and span.end <= now + most_ahead_s
        ]
        with self._lock:
            if metrics.role == "learner":
                self._step = int(metrics.values.get("step", self._step))
            self._notice(lane, metrics, now)
            self.lost += len(metrics.spans) - len(good)
            if len(self._pending) >= MAX_PENDING:
                self.lost += len(good)
            elif good:
                self._pending.append(_Report(lane, metrics.time, good))

    def listening(self, is_connected: bool) -> None:
        """Say whether reports would arrive: who is silent while they do not has not left."""
        with self._lock:
            if not is_connected:
                self._listening_since = None
            elif self._listening_since is None:
                self._listening_since = self._clock()

    @property
    def is_due(self) -> bool:
        """Whether ``flush`` has something to write."""
        with self._lock:
            self._leave(self._clock())
            return bool(self._pending or self._events) and self._clock() - self._flushed >= FLUSH_S

    def flush(self, connection: sqlite3.Connection) -> None:
        """Write what has arrived, within the caller's transaction; call ``flushed`` once it is
        committed.
        """
        with self._lock:
            pending = list(self._pending)
            events = list(self._events)
        self._in_flight = len(pending), len(events)
        sums: dict[tuple[int, int, int, str], list[float]] = defaultdict(lambda: [0.0, 0])
        lanes = _Lanes(connection)
        for report in pending:
            if (lane := lanes.accepting(report)) is None:
                continue
            for span in report.spans:
                _store_spans(connection, lane, span)
                if not span.sample:
                    _add_up(sums, lane, span)
        lanes.save()
        connection.executemany(
            "INSERT INTO buckets VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE"
            " SET seconds = seconds + excluded.seconds, count = count + excluded.count",
            [(*key, seconds, int(count)) for key, (seconds, count) in sums.items()],
        )
        rows = [
            (
                f"{event.time:.3f} {event.who} {event.text}",
                event.time,
                event.step,
                event.kind,
                event.text,
                event.who,
            )
            for event in events
        ]
        connection.executemany(
            "INSERT OR IGNORE INTO events (source, key, time, step, kind, text, who) VALUES (0, "
            "?, ?, ?, ?, ?, ?)",
            rows,
        )
        self._flushes += 1
        if self._flushes % PRUNE_EVERY == 1:
            _prune_spans(connection)

    def flushed(self) -> None:
        """Forget what the last ``flush`` has written."""
        spans, events = self._in_flight
        with self._lock:
            del self._pending[:spans], self._events[:events]
        self._flushed = self._clock()

    # -- events

    def _notice(self, lane: str, metrics: wire.Metrics, now: float) -> None:
        failure = metrics.text.get("failure", "")
        presence = self._seen.get(lane)
        if presence is None:
            self._note(now, "joined", f"{metrics.role} {metrics.id} is there", metrics.id)
        elif failure and failure != presence.failure:
            self._note(
                now, "failed", f"a group failed: {failure}", metrics.text.get("failed_by", "")
            )
        self._seen[lane] = _Seen(now, failure)

    def _leave(self, now: float) -> None:
        since = self._listening_since
        if since is None or now - since <= SILENT_S:
            return
        for lane in [lane for lane, presence in self._seen.items() if now - presence.at > SILENT_S]:
            at = self._seen.pop(lane).at
            role, _, process = lane.partition(".")
            suffix = "" if at >= since else ", while nothing was heard of the run"
            text = f"{role} {process} left, or was not heard for {SILENT_S:.0f} s{suffix}"
            self._note(max(at, since), "left", text, process)

    def _note(self, at: float, kind: str, text: str, process: str) -> None:
        if len(self._events) < MAX_PENDING:
            self._events.append(
                _LiveEvent(at, self._step, kind, " ".join(text.split())[:500], process)
            )


class _Lanes:
    """Processes by name, and the time of each one's newest report."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        rows = connection.execute("SELECT name, id, until FROM lanes").fetchall()
        self._ids = {name: number for name, number, _ in rows}
        self._until = {name: until for name, _, until in rows}
        self._changed: set[str] = set()

    def accepting(self, report: _Report) -> int | None:
        """Return the lane of a report; None if it is recorded already, or lanes are used up."""
        if report.lane not in self._ids:
            if len(self._ids) >= MAX_LANES:
                return None
            added = self._connection.execute("INSERT INTO lanes (name) VALUES (?)", (report.lane,))
            self._ids[report.lane] = added.lastrowid
            self._until[report.lane] = 0.0
        if self._until[report.lane] - AGAIN_S < report.time <= self._until[report.lane]:
            return None
        self._until[report.lane] = report.time
        self._changed.add(report.lane)
        return int(self._ids[report.lane])

    def save(self) -> None:
        rows = [(self._until[name], name) for name in self._changed]
        self._connection.executemany("UPDATE lanes SET until = ? WHERE name = ?", rows)


def _store_spans(connection: sqlite3.Connection, lane: int, span: wire.Span) -> None:
    if not span.sample and _is_solid(span.seconds, span.end - span.start):
        old_row = connection.execute(
            "SELECT start, end, seconds, count FROM spans WHERE start BETWEEN ? AND ? AND lane = "
            "? AND kind = ?"
            " AND step = ? AND ticket = 0 ORDER BY start DESC LIMIT 1",
            (span.start - JOIN_UP_TO_S, span.start + JOIN_GAP_S, lane, span.kind, span.step),
        ).fetchone()
        if (
            old_row is not None
            and abs(old_row[1] - span.start) <= JOIN_GAP_S
            and span.end - old_row[0] <= JOIN_UP_TO_S
            and _is_solid(old_row[2], old_row[1] - old_row[0])
        ):
            place = (old_row[0], lane, span.kind, old_row[1])
            connection.execute(
                "UPDATE spans SET end = ?, seconds = ?, count = ? WHERE start = ? AND lane = ? "
                "AND kind = ?"
                " AND ticket = 0 AND end = ?",
                (span.end, old_row[2] + span.seconds, old_row[3] + span.count, *place),
            )
            return
    row = (
        lane,
        span.kind,
        span.start,
        span.end,
        span.seconds,
        span.count,
        span.ticket,
        span.step,
        span.sample,
    )
    connection.execute("INSERT OR IGNORE INTO spans VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", row)


def _is_solid(seconds: float, length: float) -> bool:
    return abs(seconds - length) <= SOLID * length


def _add_up(sums: dict[tuple[int, int, int, str], list[float]], lane: int, span: wire.Span) -> None:
    """Spread a span's busy time over its buckets; its pieces count where it ends."""
    length = span.end - span.start
    for width in WIDTHS:
        first = int(span.start // width)
        last = int(span.end // width)
        for bucket in range(first, last + 1):
            inside = min(span.end, (bucket + 1) * width) - max(span.start, bucket * width)
            share = inside / length if length > 0 else float(bucket == last)
            total = sums[width, bucket, lane, span.kind]
            total[0] += share * span.seconds
            total[1] += span.count if bucket == last else 0


def _prune_spans(connection: sqlite3.Connection) -> None:
    """Delete the oldest rows beyond ``MAX_ROWS``, and note since when they are kept."""
    for width, query in (
        (0, "SELECT start FROM spans ORDER BY start"),
        *((width, _OLDEST) for width in WIDTHS),
    ):
        values = (width,) if width else ()
        row = connection.execute(f"{query} DESC LIMIT 1 OFFSET ?", (*values, MAX_ROWS)).fetchone()
        if row is None:
            continue
        if width:
            connection.execute(
                "DELETE FROM buckets WHERE width = ? AND bucket <= ?", (width, row[0])
            )
        else:
            connection.execute("DELETE FROM spans WHERE start <= ?", row)
        since = (row[0] + 1) * width if width else row[0] + JOIN_UP_TO_S
        connection.execute(
            "INSERT OR REPLACE INTO meta VALUES (?, ?)", (f"kept_since.{width}", float(since))
        )
    connection.execute(
        "DELETE FROM events WHERE source = 0 AND time <= "
        "(SELECT time FROM events WHERE source = 0 ORDER BY time DESC LIMIT 1 OFFSET ?)",
        (MAX_EVENTS,),
    )


def kept_since(connection: sqlite3.Connection, width: int) -> float:
    """Return since when single spans (width 0) or buckets of a width are kept; 0: always."""
    row = connection.execute(
        "SELECT value FROM meta WHERE name = ?", (f"kept_since.{width}",)
    ).fetchone()
    return float(row[0]) if row else 0.0
