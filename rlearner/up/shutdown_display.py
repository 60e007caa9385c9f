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
# A fleet that ends sooner needs no line.
SILENT_S: Final = 1.0


def waiting_line(waiting: Sequence[str], left_s: float) -> str:
    """Return a line like ``waiting for learner (writing the last checkpoint): 27 s``."""
    names = ", ".join(f"{name} ({DOING[name]})" if name in DOING else name for name in waiting)
    if left_s > 0:
        return f"waiting for {names}: {left_s:.0f} s"
    return f"waiting for {names}: 0 s, stopping them now"


class ShutdownDisplay:
    """Display of the shutdown: a countdown on a terminal, elsewhere lines at growing intervals."""

    def __init__(self, out: TextIO | None = None) -> None:
        self._out = out or sys.stderr
        self._is_terminal = self._out.isatty()
        self._began = time.monotonic()
        self._line = ""
        self._waiting: tuple[str, ...] = ()
        self._reminders = Reminders()

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
        if self._line:
            self._rewrite("")

    def _rewrite(self, text: str) -> None:
        if text != self._line:
            self._line = text
            self._write(f"\r\x1b[K{text}")

    def _write(self, text: str) -> None:
        with suppress(OSError):  # a closed terminal must not keep the fleet from ending
            self._out.write(text)
            self._out.flush()
