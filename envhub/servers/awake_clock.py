"""A clock that stops while all servers sleep, because others use their devices: deadlines of episodes are on it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager


class AwakeClock:
    """Monotonic seconds, without those in which ``note(True)`` was the last word.

    Args:
        clock: the clock below it, in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._slept_s = 0.0
        self._since: float | None = None  # when the servers fell asleep
        self._limits: dict[asyncio.Timeout, float] = {}  # of episodes under way, with their ends on this clock

    def now(self) -> float:
        """Return the seconds."""
        return (self._since if self._since is not None else self._clock()) - self._slept_s

    def note(self, asleep: bool) -> None:
        """Note whether all servers sleep."""
        if asleep == (self._since is not None):
            return
        if self._since is None:
            self._since = self._clock()
        else:
            self._slept_s, self._since = self._slept_s + self._clock() - self._since, None
        for limit in self._limits:
            self._set(limit)

    @asynccontextmanager
    async def timeout(self, seconds: float) -> AsyncIterator[asyncio.Timeout]:
        """As ``asyncio.timeout``, by this clock."""
        async with asyncio.timeout(None) as limit:
            self._limits[limit] = self.now() + seconds
            self._set(limit)
            try:
                yield limit
            finally:
                del self._limits[limit]

    def _set(self, limit: asyncio.Timeout) -> None:
        left_s = self._limits[limit] - self.now()
        if not limit.expired():
            limit.reschedule(None if self._since is not None else asyncio.get_running_loop().time() + left_s)
