"""Logs once when the broker starts to refuse messages and once when it accepts them again."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

log = logging.getLogger(__name__)

SAY_AFTER_S: Final = 3.0  # shorter refusals are not logged, such as those during a leader election
# limits of account, server memory, server storage, stream
FULL: Final = (10002, 10023, 10047, 10077)
FIRST_PAUSE_S: Final = 0.25
LONGEST_PAUSE_S: Final = 4.0  # each retry sends the whole body again


class PendingPublish:
    """A message being published to a stream."""

    def __init__(self, refusals: RefusalTracker) -> None:
        self._refusals = refusals
        self._times = 0
        self._since = 0.0

    def refused(self, subject: str, reason: str, *, full: bool) -> float:
        """Record a temporary refusal; return the seconds to wait before the next try."""
        now = time.monotonic()
        self._times += 1
        self._since = self._since or now
        if full or now - self._since > SAY_AFTER_S:
            self._refusals.add(self, subject, reason, full=full)
        if not full:
            return FIRST_PAUSE_S
        return min(FIRST_PAUSE_S * 2.0 ** (self._times - 1), LONGEST_PAUSE_S)


class RefusalTracker:
    """Refusals of one connection.

    Args:
        address: broker address without a password.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        # waiting messages; True: because the store is full
        self._refused: dict[PendingPublish, bool] = {}
        self._since: float | None = None  # time of the logged warning; None: none is active

    @property
    def full(self) -> bool:
        """Whether a message waits because the broker's store is full."""
        return any(self._refused.values())

    @contextmanager
    def publish(self) -> Iterator[PendingPublish]:
        """Track one message while it is being published."""
        pending = PendingPublish(self)
        try:
            yield pending
        finally:
            if (
                self._refused.pop(pending, None) is not None
                and not self._refused
                and self._since is not None
            ):
                log.warning(
                    "the broker at %s stores again after %.0f s",
                    self._address,
                    time.monotonic() - self._since,
                )
                self._since = None

    def add(self, publish: PendingPublish, subject: str, reason: str, *, full: bool) -> None:
        """Add a waiting message; log a warning if it is the first."""
        self._refused[publish] = full
        if self._since is None:
            self._since = time.monotonic()
            log.warning(
                "%s: the broker at %s cannot store: %s; retrying until it can",
                subject,
                self._address,
                reason,
            )
