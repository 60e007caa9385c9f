"""Logs once when the broker begins to refuse messages, and once when it accepts them again."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

log = logging.getLogger(__name__)

SAY_AFTER_S: Final = 3.0  # of a refusal that may be over at once, such as a stream between two leaders
# No room: the account's limit, the server's, memory or storage, or the stream's own.
FULL: Final = (10002, 10023, 10047, 10077)
FIRST_PAUSE_S: Final = 0.25
LONGEST_PAUSE_S: Final = 4.0  # a repetition sends the whole body again


class PendingPublish:
    """One message on its way into a stream."""

    def __init__(self, refusals: RefusalTracker) -> None:
        self._refusals, self._times = refusals, 0
        self._since = 0.0

    def refused(self, subject: str, reason: str, *, full: bool) -> float:
        """The broker refused it for now: seconds until it may be tried again."""
        now = time.monotonic()
        self._times += 1
        self._since = self._since or now
        if full or now - self._since > SAY_AFTER_S:
            self._refusals.add(self, subject, reason, full=full)
        return min(FIRST_PAUSE_S * 2 ** (self._times - 1), LONGEST_PAUSE_S) if full else FIRST_PAUSE_S


class RefusalTracker:
    """Of one connection.

    Args:
        where: address of the broker, without a password.
    """

    def __init__(self, where: str) -> None:
        self._where = where
        self._refused: dict[PendingPublish, bool] = {}  # those that wait; whether for room
        self._since: float | None = None  # when it was said, None: nothing to take back

    @property
    def full(self) -> bool:
        """Whether something waits because the broker's store is full."""
        return any(self._refused.values())

    @contextmanager
    def publish(self) -> Iterator[PendingPublish]:
        """For the time that one message is on its way."""
        made = PendingPublish(self)
        try:
            yield made
        finally:
            if self._refused.pop(made, None) is not None and not self._refused and self._since is not None:
                log.warning("the broker at %s stores again, after %.0f s", self._where, time.monotonic() - self._since)
                self._since = None

    def add(self, publish: PendingPublish, subject: str, reason: str, *, full: bool) -> None:
        """One more that waits."""
        self._refused[publish] = full
        if self._since is None:
            self._since = time.monotonic()
            log.warning(
                "%s: the broker at %s cannot store: %s; trying again until it can", subject, self._where, reason
            )
