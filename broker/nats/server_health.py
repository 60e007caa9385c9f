"""Decides when to switch away from a server that accepts connections but stops answering. Pure: times are arguments.

A server that is cut off from its cluster goes on answering some requests for half a minute: it takes itself for the
leader of some streams until it has missed the others for long enough. So each kind of request is doubted by itself, and
the answers to others say nothing about it.
"""

from __future__ import annotations

from typing import Final

MOVE_AFTER_S: Final = 8.0  # longer than most elections of a leader
MOVE_AGAIN_AFTER_S: Final = 16.0  # when the move before was of no use: the leader is missing everywhere
CALM_S: Final = 60.0  # without a move, after which the next one comes early again
STALE_S: Final = 12.0  # without a word, after which a doubt counts no more: nobody asks any longer


class ServerHealth:
    """What has had no answer, and since when. Times are seconds of one monotonic clock."""

    def __init__(self) -> None:
        self._since: dict[str, tuple[float, float]] = {}  # (first asked in vain, last heard of that)
        self._moved = float("-inf")

    def doubt(self, what: str, now: float, waited_s: float = 0.0) -> bool:
        """That request had no answer for ``waited_s``. Whether to go to another server now."""
        first, last = self._since.get(what, (now - waited_s, now))
        if now - last > STALE_S:
            first = now - waited_s
        self._since[what] = (first, now)
        return now - first >= (MOVE_AFTER_S if now - self._moved > CALM_S else MOVE_AGAIN_AFTER_S)

    def trust(self, what: str) -> None:
        """It had one."""
        self._since.pop(what, None)

    def moved(self, now: float) -> None:
        """To another server, for that reason."""
        self._moved = now
        self._since.clear()

    def clear(self) -> None:
        """A new connection knows nothing yet."""
        self._since.clear()
