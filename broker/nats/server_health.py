"""Decides when to switch away from a server that accepts connections but stops answering.

A server cut off from its cluster answers some requests for up to half a minute, because it still
takes itself for the leader of some streams. Each kind of request is therefore tracked separately.
"""

from __future__ import annotations

from typing import Final

MOVE_AFTER_S: Final = 8.0  # longer than most leader elections
# after a recent move that did not help: the leader is missing everywhere
MOVE_AGAIN_AFTER_S: Final = 16.0
CALM_S: Final = 60.0  # without a move, after which MOVE_AFTER_S applies again
STALE_S: Final = 12.0  # without a new failure, after which older failures no longer count


class ServerHealth:
    """Kinds of requests without a reply, and since when, in seconds of a monotonic clock."""

    def __init__(self) -> None:
        self._since: dict[str, tuple[float, float]] = {}  # (first failure, latest failure)
        self._moved = float("-inf")

    def doubt(self, request_kind: str, now: float, waited_s: float = 0.0) -> bool:
        """Record that a request had no reply for ``waited_s``; return whether to switch servers
        now.
        """
        first, last = self._since.get(request_kind, (now - waited_s, now))
        if now - last > STALE_S:
            first = now - waited_s
        self._since[request_kind] = (first, now)
        return now - first >= (MOVE_AFTER_S if now - self._moved > CALM_S else MOVE_AGAIN_AFTER_S)

    def trust(self, request_kind: str) -> None:
        """Record that a request of this kind had a reply."""
        self._since.pop(request_kind, None)

    def moved(self, now: float) -> None:
        """Record a switch to another server."""
        self._moved = now
        self._since.clear()

    def clear(self) -> None:
        """Forget all failures, for a new connection."""
        self._since.clear()
