"""A clock that stops while a hub cannot work: while all servers sleep, or its event loop hangs.

Deadlines of groups, and timeouts of episodes and turns, are on it. So a hub that was frozen,
suspended or starved does not find everything too late when it continues.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

BEAT_S: Final = 0.25
# without a beat; a busy loop is later than BEAT_S
STANDS_AFTER_S: Final = 1.0


class AwakeClock:
    """Monotonic seconds, without those since ``note(True)`` or in which the event loop hung.

    Args:
        clock: the clock below it, in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lost_s = 0.0  # seconds that do not count
        self._since: float | None = None  # when the servers fell asleep
        # of the clock below; None: nothing watches the event loop
        self._beat_at: float | None = None
        self._limits: dict[asyncio.Timeout, _Limit] = {}  # of episodes under way

    def now(self) -> float:
        """Return the seconds."""
        clock_s = self._running() if self._since is None else self._since
        return clock_s - self._lost_s

    async def serve(self) -> None:
        """Watch the event loop until cancelled."""
        try:
            while True:
                self._beat()
                await asyncio.sleep(BEAT_S)
        finally:
            self._beat()
            self._beat_at = None

    def note(self, asleep: bool) -> None:
        """Note whether all servers sleep."""
        if asleep == (self._since is not None):
            return
        if self._since is None:
            self._since = self._running()
        else:
            self._lost_s = self._lost_s + self._running() - self._since
            self._since = None
        for limit in self._limits.values():
            limit.renew()

    @asynccontextmanager
    async def timeout(self, seconds: float) -> AsyncIterator[asyncio.Timeout]:
        """As ``asyncio.timeout``, by this clock."""
        async with asyncio.timeout(None) as timeout:
            limit = self._limits[timeout] = _Limit(self, timeout, self.now() + seconds)
            limit.renew()
            try:
                yield timeout
            finally:
                # a timer that remains would fire after its episode
                self._limits.pop(timeout).close()

    @property
    def is_stopped(self) -> bool:
        """Whether all servers sleep."""
        return self._since is not None

    def _running(self) -> float:
        """Return the clock below, at most a little later than the newest beat."""
        if self._beat_at is None:
            return self._clock()
        return min(self._clock(), self._beat_at + STANDS_AFTER_S)

    def _beat(self) -> None:
        now = self._clock()
        stood_s = now - self._running()
        if self._since is not None:
            self._since += stood_s
        self._lost_s = self._lost_s + stood_s
        self._beat_at = now


class _Limit:
    """The end of one timeout by its clock, as the loop's own timers expire while the loop hangs."""

    def __init__(self, clock: AwakeClock, timeout: asyncio.Timeout, ends_at: float) -> None:
        self._clock = clock
        self._timeout = timeout
        self._ends_at = ends_at
        self._timer: asyncio.TimerHandle | None = None

    def renew(self) -> None:
        """Wait for what is left, unless the clock is stopped."""
        self.close()
        left_s = self._ends_at - self._clock.now()
        if self._timeout.expired() or self._clock.is_stopped:
            return
        if left_s <= 0:
            self._timeout.reschedule(asyncio.get_running_loop().time())
        else:
            self._timer = asyncio.get_running_loop().call_later(left_s, self.renew)

    def close(self) -> None:
        """Stop waiting."""
        if self._timer is not None:
            self._timer.cancel()
