"""Shows which processes ``rlearner up`` waits for at its end, what they do, and for how long."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Final, TextIO

from broker.system.reminders import Reminders

DOING: Final = {
    "learner": "writing the last checkpoint",
    "envhub": "ending its episodes",
    "rewardhub": "ending its scores",
    "rollout-server": "ending its requests",
}
SILENT_S: Final = 1.0  # a fleet that ends sooner needs no line


def waiting_line(waiting: Sequence[str], left_s: float) -> str:
    """Return ``waiting for learner (writing the last checkpoint): 27 s``; ``waiting``: names of
    running children.
    """
    named = ", ".join(f"{name} ({DOING[name]})" if name in DOING else name for name in waiting)
    return f"waiting for {named}: {max(left_s, 0.0):.0f} s" + (
        "" if left_s > 0 else ", stopping them now"
    )


class ShutdownDisplay:
    """Display of the shutdown: one countdown line on a terminal, elsewhere lines at growing
    intervals.
    """

    def __init__(self, out: TextIO | None = None) -> None:
        self._out = out or sys.stderr
        self._is_terminal = self._out.isatty()
        self._began = time.monotonic()
        self._shown, self._waiting, self._reminders = "", tuple[str, ...](), Reminders()

    def __call__(self, waiting: Sequence[str], left_s: float) -> None:
        """Show the children that are still running; called often."""
        now = time.monotonic()
        if now - self._began < SILENT_S:
            return
        if self._is_terminal:
            self._rewrite(waiting_line(waiting, left_s))
            return
        if tuple(waiting) != self._waiting:
            self._waiting = tuple(waiting)
            self._reminders.over()
        if self._reminders.due(now):
            self._write(waiting_line(waiting, left_s) + "\n")

    def close(self) -> None:
        """Clear the line on a terminal."""
        if self._shown:
            self._rewrite("")

    def _rewrite(self, text: str) -> None:
        if text != self._shown:
            self._shown = text
            self._write(f"\r\x1b[K{text}")

    def _write(self, text: str) -> None:
        with suppress(OSError):  # a closed terminal must not keep the fleet from ending
            self._out.write(text)
            self._out.flush()
