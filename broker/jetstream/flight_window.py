"""Bounds the bytes of requests on the wire: more while answers come quickly, fewer once they are
late.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

# a server drops a client that takes over 10 s to read what waits for it
LEAST_BYTES: Final = 4 << 20
MOST_BYTES: Final = 16 << 20  # what a link of 3 Gbit/s holds at a round trip of 40 ms
QUICK_S: Final = 0.5  # an answer within it found the link with room for more


class FlightWindow:
    """Window of the bytes that answers on the wire may have; the requests of the oldest owner go
    first.

    Attributes:
        limit: bytes that may be on the wire now; a single larger answer may be, too.
    """

    def __init__(self) -> None:
        self.limit = LEAST_BYTES
        self._used = self._number = 0
        # heap of (owner, number, bytes, turn)
        self._waiting: list[tuple[int, int, int, asyncio.Future[None]]] = []

    @asynccontextmanager
    async def slot(self, owner: int, num_bytes: int) -> AsyncIterator[None]:
        """Wait for room, and keep it while the request is on the wire.

        Args:
            owner: number of what the request belongs to; lower numbers go first.
            num_bytes: of the answer.
        """
        loop = asyncio.get_running_loop()
        await self._enter(owner, num_bytes)
        began = loop.time()
        try:
            yield
            self._adapt(num_bytes, loop.time() - began)
        finally:
            self._used -= num_bytes
            self._grant()

    async def _enter(self, owner: int, num_bytes: int) -> None:
        self._number += 1
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (owner, self._number, num_bytes, turn))
        self._grant()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._used -= num_bytes
                self._grant()
            raise

    def _grant(self) -> None:
        while self._waiting:
            _, _, num_bytes, turn = self._waiting[0]
            if not turn.done():
                if self._used and self._used + num_bytes > self.limit:
                    return
                self._used += num_bytes
                turn.set_result(None)
            heapq.heappop(self._waiting)

    def _adapt(self, num_bytes: int, seconds: float) -> None:
        """Grow by what was answered quickly, so that the window doubles in a round trip; else halve
        it.
        """
        if seconds <= QUICK_S:
            self.limit = min(self.limit + num_bytes, MOST_BYTES)
        else:
            self.limit = max(self.limit // 2, LEAST_BYTES)
