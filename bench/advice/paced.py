"""Requests that are served at a pace that depends on how many there are, in real or in virtual
time.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque


class PacedQueue:
    """One server: at most ``slots`` requests at once, each with a token every ``token_s +
    token_each_s * running``.
    """

    def __init__(self, slots: int, token_s: float, token_each_s: float) -> None:
        self.slots = slots
        self._base = token_s
        self._each = token_each_s
        # by the token count at which each ends
        self._done: list[tuple[float, int, asyncio.Future[None]]] = []
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._count = 0
        self._tokens = 0.0
        self._at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._sampled = 0.0
        self._busy_s = 0.0

    def counts(self) -> tuple[int, float]:
        """Return the tokens of all requests so far, and the seconds in which there was one."""
        self._pass()
        return int(self._sampled), self._busy_s

    @property
    def running(self) -> int:
        return len(self._done)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    async def serve(self, tokens: int) -> None:
        """Return once that many tokens have been sampled."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._pass()
        self._waiting.append((tokens, done))
        self._plan()
        await done

    def _pass(self) -> None:
        now = asyncio.get_running_loop().time()
        if self._done:
            each = (now - self._at) / (self._base + self._each * len(self._done))
            self._tokens += each
            self._sampled += each * len(self._done)
            self._busy_s += now - self._at
        self._at = now

    def _plan(self) -> None:
        while self._waiting and len(self._done) < self.slots:
            tokens, done = self._waiting.popleft()
            if not done.done():  # else it was given up
                self._count += 1
                heapq.heappush(self._done, (self._tokens + tokens, self._count, done))
        if self._timer is not None:
            self._timer.cancel()
        if self._done:
            left_s = (self._done[0][0] - self._tokens) * (self._base + self._each * len(self._done))
            self._timer = asyncio.get_running_loop().call_later(max(0.0, left_s), self._end)

    def _end(self) -> None:
        self._pass()
        self._tokens = max(self._tokens, self._done[0][0])
        while self._done and self._done[0][0] <= self._tokens + 1e-9:
            _, _, done = heapq.heappop(self._done)
            if not done.done():
                done.set_result(None)
        self._timer = None
        self._plan()
