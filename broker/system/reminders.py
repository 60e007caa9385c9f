"""When to say again that something is still being waited for. Pure."""

from __future__ import annotations

from typing import Final

FIRST_S: Final = 5.0
LONGEST_S: Final = 300.0


class Reminders:
    """Due at once, then after 5, 10, 20, … seconds, at most every 5 minutes, until it is over.

    Attributes:
        said: whether it was due since it last was over.
    """

    def __init__(self) -> None:
        self.said = False
        self._next = self._wait_s = 0.0

    def due(self, now: float) -> bool:
        """Whether to say it now; if so, the next time is later than this one was.

        Args:
            now: seconds of any monotonic clock.
        """
        if self.said and now < self._next:
            return False
        self._wait_s = min(2 * self._wait_s, LONGEST_S) if self.said else FIRST_S
        self.said, self._next = True, now + self._wait_s
        return True

    def over(self) -> None:
        """What was waited for has come: the next wait is said at once again."""
        self.said = False
