"""Counts failed groups, and decides when the live view reports them. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

CLOSED: Final = "ticket/closed_"
# Closed by the learner's pace, the operator's rebase, or a filter.
NO_FAULT: Final = ("late", "lost", "filtered")
# While nothing is trained.
REMIND_EVERY_S: Final = 60.0
# Of an error message; its end is kept, which names the file and line.
MAX_CHARS: Final = 400
END_CHARS: Final = 120


@dataclass
class FailedGroups:
    """Failed groups, from the learner's metrics.

    Attributes:
        counts: failed groups by reason.
        trained: number of trained groups.
        last: reason and detail of the newest failure.
        by: id of the process that gave up the group.
    """

    counts: dict[str, int] = field(default_factory=dict)
    trained: int = 0
    last: str = ""
    by: str = ""
    trained_then: int = 0  # at the newest failure
    _reported: int = 0
    _reported_at: float = 0.0

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    @property
    def stuck(self) -> bool:
        """Whether no group was trained since the newest failure."""
        return self.total > 0 and self.trained <= self.trained_then

    def take(self, values: Mapping[str, float], text: Mapping[str, str]) -> None:
        """Apply one metrics message of the learner."""
        previous_total = self.total
        trained = int(values.get("ticket/trained", self.trained))
        for name, value in values.items():
            if name.startswith(CLOSED) and name not in (f"{CLOSED}{reason}" for reason in NO_FAULT):
                self.counts[name.removeprefix(CLOSED)] = int(value)
        if self.total > previous_total:
            self.trained_then = trained
        self.trained = trained
        self.last = text.get("failure", self.last)
        self.by = text.get("failed_by", self.by)

    def news(self, now: float, logs: Path) -> str:
        """Return a line at the first failure, each doubling, and each minute without training."""
        is_reminder = (
            self.stuck and self.total > self._reported and now - self._reported_at >= REMIND_EVERY_S
        )
        if not self.total or (self.total < 2 * self._reported and not is_reminder):
            return ""
        self._reported = self.total
        self._reported_at = now
        return self.line(logs)

    def line(self, logs: Path) -> str:
        """Return the count, the last failure, and the log to read."""
        groups = f"group{'s' * (self.total != 1)}"
        trained = f"{self.trained or 'none'} trained"
        if not self.trained:
            trained += " yet"
        # `up` names the logs of its processes so.
        role = next(
            (role for role in ("rewardhub", "envhub") if self.by.startswith(role)), "learner"
        )
        last = shorten_text(self.last) or "unknown"
        return (
            f"{self.total} {groups} failed so far, {trained}; last: {last}, see {logs / role}.log"
        )


def shorten_text(text: str) -> str:
    """Return the text, without its middle if it is long."""
    if len(text) <= MAX_CHARS:
        return text
    return f"{text[: MAX_CHARS - END_CHARS]} … {text[-END_CHARS:]}"


def by_reason(counts: Mapping[str, int]) -> str:
    """Return ``35 (reward_error 33, env_error 2)``, the most frequent first."""
    most = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return f"{sum(counts.values())} ({', '.join(f'{reason} {count}' for reason, count in most)})"
