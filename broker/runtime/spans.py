"""Adds up what a process does, for the timeline: a row per kind of work and second.

Beginning and ending a piece of work costs about a microsecond. What lasts longer than a report is
reported in parts; pieces with short gaps between them become one span, whose ``seconds`` tell how
much of it was busy. While nothing of all this goes on, the process waits. A few pieces of each
report are also reported singly, as samples.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from broker.contract import wire
from broker.telemetry.traces import TicketTraces

# Pieces with a shorter gap between them are one span.
GAP_S: Final = 0.05
# Spans of one kind and report; further ones are merged.
MAX_PARTS: Final = 8
MAX_SAMPLES: Final = 12  # single pieces in a report
WAIT: Final = "wait"


@dataclass
class _Part:
    start: float
    end: float
    seconds: float
    count: int
    step: int


@dataclass
class _Activity:
    """One kind of work; ``start`` is NaN while no part is open."""

    running: int = 0
    start: float = math.nan
    since: float = 0.0  # up to which ``seconds`` are added up
    seconds: float = 0.0
    count: int = 0
    step: int = -1

    def enter(self, now: float, step: int, parts: list[_Part]) -> None:
        if self.running:
            self.seconds += self.running * (now - self.since)
            if step != self.step:
                self.step = -1
        elif self.start != self.start:
            self.start = now
            self.step = step
        elif len(parts) < MAX_PARTS and (now - self.since > GAP_S or step != self.step):
            parts.append(_Part(self.start, self.since, self.seconds, self.count, self.step))
            self.start = now
            self.seconds = 0.0
            self.count = 0
            self.step = step
        elif step != self.step:
            self.step = -1
        self.since = now
        self.running += 1

    def leave(self, now: float) -> None:
        self.seconds += self.running * (now - self.since)
        self.since = now
        self.running -= 1
        self.count += 1

    def report(self, now: float, parts: list[_Part]) -> None:
        """Close the open part; what is still running opens the next one."""
        if self.start != self.start:
            return
        if self.running:
            self.seconds += self.running * (now - self.since)
            self.since = now
        parts.append(_Part(self.start, self.since, self.seconds, self.count, self.step))
        self.start = now if self.running else math.nan
        self.seconds = 0.0
        self.count = 0


class SpanRecorder:
    """Recorder of one process; every method may be called from any thread.

    Args:
        clock: seconds, monotonic.
        wall: seconds since 1970, read at each report.

    Attributes:
        traces: also gets each piece of work of a ticket that is traced; None: none is.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, wall: Callable[[], float] = time.time
    ) -> None:
        self._clock = clock
        self._wall = wall
        self.traces: TicketTraces | None = None
        self._lock = threading.Lock()
        self._running = 0
        self._activities: dict[wire.SpanKind, _Activity] = {WAIT: _Activity()}
        self._parts: dict[wire.SpanKind, list[_Part]] = {WAIT: []}
        self._samples: list[tuple[wire.SpanKind, float, float, int, int]] = []
        self._activities[WAIT].enter(clock(), -1, [])

    def enter(self, kind: wire.SpanKind, step: int = -1) -> float:
        """Begin a piece of work; pass the result to ``leave``."""
        with self._lock:
            now = self._clock()
            activity = self._activities.get(kind)
            if activity is None:
                activity = self._activities[kind] = _Activity()
                self._parts[kind] = []
            activity.enter(now, step, self._parts[kind])
            if not self._running:
                self._activities[WAIT].leave(now)
            self._running += 1
        return now

    def leave(self, kind: wire.SpanKind, began: float, ticket: int = 0, step: int = -1) -> None:
        """End a piece of work."""
        with self._lock:
            now = self._clock()
            self._activities[kind].leave(now)
            self._running -= 1
            if not self._running:
                self._activities[WAIT].enter(now, -1, self._parts[WAIT])
            if len(self._samples) < MAX_SAMPLES and ticket:
                self._samples.append((kind, began, now, ticket, step))
        if ticket and self.traces is not None:
            shift = self._wall() - now
            self.traces.add(kind, ticket, began + shift, now + shift)

    @contextmanager
    def work(self, kind: wire.SpanKind, ticket: int = 0, step: int = -1) -> Iterator[None]:
        """Record the block as a piece of work."""
        began = self.enter(kind, step)
        try:
            yield
        finally:
            self.leave(kind, began, ticket, step)

    def take(self) -> list[wire.Span]:
        """Return what was done since the last call, by kind and start."""
        with self._lock:
            now = self._clock()
            shift = self._wall() - now
            for kind, activity in self._activities.items():
                activity.report(now, self._parts[kind])
            parts = [
                (kind, part)
                for kind, own in self._parts.items()
                for part in own
                if part.end > part.start or part.count
            ]
            samples = self._samples
            self._parts = {kind: [] for kind in self._activities}
            self._samples = []
        spans = [
            wire.Span(
                kind=kind,
                start=part.start + shift,
                end=part.end + shift,
                seconds=part.seconds,
                count=part.count,
                step=part.step,
            )
            for kind, part in parts
        ]
        spans += [
            wire.Span(
                kind=kind,
                start=start + shift,
                end=end + shift,
                seconds=end - start,
                count=1,
                ticket=ticket,
                step=step,
                sample=True,
            )
            for kind, start, end, ticket, step in samples
        ]
        return spans
