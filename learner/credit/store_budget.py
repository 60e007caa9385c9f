"""Decides how much of the broker's store a run may fill. Pure.

A run may fill the store's limit less what others hold in it. Tickets are permission to fill it, so
they wait while the stored messages and those expected of open tickets come near to that; and a
checkpoint is due earlier, because the log is only trimmed behind a checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

# Shares of what the run may fill. The part above the first is for errors of the estimate; below the
# second, tickets no longer count as held back.
ADMIT_BELOW: Final = 0.8
OPEN_BELOW: Final = 0.7
# Lower: a checkpoint trims the log before tickets have to wait.
PRESSED_ABOVE: Final = 0.6
# Assumed size of a group before the first one arrives.
FIRST_GUESS_BYTES: Final = 1 << 20
# Groups of which the mean size counts; a single one may be no more than its closing.
MEASURED_FROM: Final = 8


@dataclass(frozen=True)
class StoreUsage:
    """Usage of the broker's store, in bytes of one replica."""

    used: int  # by all streams
    run: int  # by this run's tickets, episodes and samples
    groups: int  # messages among these that are or were groups
    limit: int | None  # of the account, None if it has none
    stores: bool = True  # whether the broker accepted a small message


class StoreBudget:
    """Budget of the run, from the newest usage.

    Args:
        limit: configured bytes of the store; None: only the account's and refusals are known.
        press_from: bytes that replace an unknown limit for checkpoints, but not for tickets.
    """

    def __init__(self, limit: int | None, press_from: int) -> None:
        self._configured = limit
        self._press_from = press_from
        self._refused_at: int | None = None  # what the store held at the first refusal
        self._usage = StoreUsage(0, 0, 0, None)
        self._group_bytes = float(FIRST_GUESS_BYTES)
        self._is_measured = False
        self._under_way = 0  # tickets published and without a record

    def look(self, usage: StoreUsage, under_way: int) -> None:
        """Update the usage.

        Args:
            under_way: number of published tickets without a record.
        """
        self._usage = usage
        self._under_way = under_way
        if usage.groups:
            self._group_bytes = usage.run / usage.groups
        self._is_measured = self._is_measured or usage.groups >= MEASURED_FROM
        if not usage.stores:
            self._refused_at = min(usage.used, self._refused_at or usage.used)
        elif self._refused_at is not None and usage.used > self._refused_at:
            self._refused_at = None  # the limit has grown

    @property
    def limit(self) -> int | None:
        """Bytes that the store may hold, None if unknown."""
        limits = [
            limit
            for limit in (self._usage.limit, self._configured, self._refused_at)
            if limit is not None
        ]
        return min(limits, default=None)

    @property
    def measured(self) -> bool:
        """Whether the size of groups is known from some; before, it is a guess."""
        return self._is_measured

    @property
    def usage(self) -> StoreUsage:
        """The newest usage."""
        return self._usage

    @property
    def pressed(self) -> bool:
        """Whether the next step boundary should take a checkpoint, so that the log is trimmed."""
        limit = self._press_from if self.limit is None else self.limit
        return not self._usage.stores or self._usage.run > PRESSED_ABOVE * self._may_fill(limit)

    @property
    def relaxed(self) -> bool:
        """Whether tickets need not be held back, with a margin."""
        return self._fits(0, OPEN_BELOW)

    def admit(self, *, needed: bool = True) -> bool:
        """Return whether one more ticket may be published now, and count it as published.

        While a step needs groups, one ticket is always admitted: a run whose steps do not fit
        continues slowly.

        Args:
            needed: whether the current step still lacks groups.
        """
        if (self._under_way or not needed) and not self._fits(1, ADMIT_BELOW):
            return False
        self._under_way += 1
        return True

    def _fits(self, more: int, share: float) -> bool:
        if self.limit is None:
            return True
        expected = (self._under_way + more) * self._group_bytes
        return self._usage.run + expected <= share * self._may_fill(self.limit)

    def _may_fill(self, limit: int) -> int:
        return max(limit - (self._usage.used - self._usage.run), 0)
