"""How much of the broker's store a run may fill. Pure: looks in, decisions out.

A run may fill what the store holds at most less what others hold in it. Tickets are permission to fill it, so they wait while what is
there and what is expected of open tickets come near to that; and a checkpoint falls due earlier, for only behind a checkpoint is the
log trimmed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

ADMIT_BELOW: Final = 0.8  # of what the run may fill; the rest is for errors in what is expected
OPEN_BELOW: Final = 0.7  # from here on tickets no longer count as held back
PRESSED_ABOVE: Final = 0.6
FIRST_GUESS_BYTES: Final = 1 << 20  # of a group, before one was seen


@dataclass(frozen=True)
class Usage:
    """What one look at the broker found. Bytes of one replica.

    Attributes:
        used: by all streams.
        run: by this run's tickets, episodes and samples.
        groups: messages among these that are or were groups.
        limit: of the account, None where it has none.
        stores: whether the broker took a small message.
    """

    used: int
    run: int
    groups: int
    limit: int | None
    stores: bool = True


class Room:
    """What the newest look allows.

    Args:
        limit: bytes that the store may hold as far as the operator says; None: only the account's limit and refusals tell.
        press_from: bytes that stand for the limit where nothing tells it: above a share of these a checkpoint falls due, no ticket waits.
    """

    def __init__(self, limit: int | None, press_from: int) -> None:
        self._configured, self._press_from = limit, press_from
        self._learned: int | None = None  # what the store held when it was first refused
        self._usage = Usage(0, 0, 0, None)
        self._group_bytes = float(FIRST_GUESS_BYTES)
        self._under_way = 0  # tickets published and without a record

    def look(self, usage: Usage, under_way: int) -> None:
        """Take in a look at the broker.

        Args:
            under_way: tickets published that have no record yet.
        """
        self._usage, self._under_way = usage, under_way
        if usage.groups:
            self._group_bytes = usage.run / usage.groups
        if not usage.stores:
            self._learned = min(usage.used, self._learned or usage.used)
        elif self._learned is not None and usage.used > self._learned:
            self._learned = None  # there is more room now

    @property
    def limit(self) -> int | None:
        """Bytes that the store may hold, None where nobody knows."""
        known = [limit for limit in (self._usage.limit, self._configured, self._learned) if limit is not None]
        return min(known, default=None)

    @property
    def usage(self) -> Usage:
        """The newest look."""
        return self._usage

    @property
    def pressed(self) -> bool:
        """Whether a checkpoint should be taken at the next step boundary, so that the log can be trimmed."""
        limit = self._press_from if self.limit is None else self.limit
        return not self._usage.stores or self._usage.run > PRESSED_ABOVE * self._may_fill(limit)

    @property
    def relaxed(self) -> bool:
        """Whether tickets need not be held back, by a margin."""
        return self._fits(0, OPEN_BELOW)

    def admit(self, *, needed: bool = True) -> bool:
        """Whether one more ticket may be published now; it counts as published then.

        While a step needs groups, one is always under way: a run whose steps do not fit gets on slowly until the store itself refuses, and
        does not stop here.

        Args:
            needed: whether the step under way still lacks groups.
        """
        if (self._under_way or not needed) and not self._fits(1, ADMIT_BELOW):
            return False
        self._under_way += 1
        return True

    def _fits(self, more: int, share: float) -> bool:
        if self.limit is None:
            return True
        return self._usage.run + (self._under_way + more) * self._group_bytes <= share * self._may_fill(self.limit)

    def _may_fill(self, limit: int) -> int:
        return max(limit - (self._usage.used - self._usage.run), 0)
