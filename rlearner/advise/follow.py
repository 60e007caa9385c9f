"""Keeps the newest steps of a live run, and decides when to compute its advice again. No I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, Final

from rlearner.advise.fit import MAX_STEPS

# Steps between two pieces of advice: few at the start of a run, more once the figures are steady.
SOONEST: Final = 3
LATEST: Final = 20
# Times as long as the newest advice took to compute, which takes seconds: 1 % of one core.
PAUSE: Final = 100


class StepHistory:
    """The newest lines of metrics.jsonl, as they are published.

    Args:
        first_cost_s: seconds that the first advice is taken to cost, before it is measured.
    """

    def __init__(self, first_cost_s: float = 0.0) -> None:
        self._rows: deque[dict[str, float]] = deque(maxlen=2 * MAX_STEPS)
        self._next = SOONEST
        # seconds of all steps so far, and those before the next advice
        self._elapsed_s = 0.0
        self._not_before_s = PAUSE * first_cost_s

    def take(self, line: Mapping[str, float]) -> None:
        """Add the line of a step; a line that is known already changes nothing."""
        step = int(line.get("step", 0))
        if not step or "time/step" not in line:
            return
        # The learner resumed from an earlier step.
        if self._rows and step < self._rows[-1]["step"]:
            self._rows.clear()
            self._next = step + SOONEST
        if not self._rows or step > self._rows[-1]["step"]:
            self._rows.append(dict(line))
            self._elapsed_s += line["time/step"]

    def computed(self, seconds: float) -> None:
        """Note how long the advice took to compute."""
        self._not_before_s = self._elapsed_s + PAUSE * seconds

    def due(self) -> list[dict[str, Any]]:
        """Return the lines if it is time for new advice, else none."""
        if (
            not self._rows
            or self._rows[-1]["step"] < self._next
            or self._elapsed_s < self._not_before_s
        ):
            return []
        step = int(self._rows[-1]["step"])
        self._next = step + min(max(step // 2, SOONEST), LATEST)
        return list(self._rows)
