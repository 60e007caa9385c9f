"""Counts what a process did with the messages of each stream."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class StreamCounts:
    """Messages by stream, since the start of the process.

    Attributes:
        published: stored by this process, and confirmed.
        consumed: received from a work queue, or read from a log.
        redelivered: those of ``consumed`` that had been delivered before, to any process.
        acknowledged: ended by this process.
        handed_back: returned to the queue.
    """

    published: Counter[str] = field(default_factory=Counter)
    consumed: Counter[str] = field(default_factory=Counter)
    redelivered: Counter[str] = field(default_factory=Counter)
    acknowledged: Counter[str] = field(default_factory=Counter)
    handed_back: Counter[str] = field(default_factory=Counter)
