"""Decides when to report again that something is still awaited. Pure."""

from __future__ import annotations

from typing import Final

FIRST_S: Final = 5.0
LONGEST_S: Final = 300.0


class Reminders:
    """Due at once, then after 5, 10, 20, … seconds, at most every 5 minutes.

    Attributes:
        said: whether it was due since the wait began.
    """

    def __init__(self) -> None:
        self.said = False
        self._next = self._wait_s = 0.0

    def due(self, now: float) -> bool:
        """Decide whether to report now; if so, the next time is later than this one was.

        Args:
            now: seconds of any monotonic clock.
        """
        if self.said and now < self._next:
            return False
        self._wait_s = min(2 * self._wait_s, LONGEST_S) if self.said else FIRST_S
        self.said = True
        self._next = now + self._wait_s
        return True

    def over(self) -> None:
        """End the wait: the next one is reported at once."""
        self.said = False
