"""Quotas of one API key: requests and tokens per minute, requests at once (pure)."""

from __future__ import annotations

import math
from typing import Final

from rlearner_text.openai.http_errors import HttpError
from rlearner_text.openai.named_keys import NamedKey

MINUTE_S: Final = 60.0


class Budget:
    """An amount that refills evenly, a minute's worth at most; it may be overdrawn, and is repaid
    before more is given.

    Args:
        per_minute: 0: no limit.
    """

    def __init__(self, per_minute: int, now: float) -> None:
        self._per_minute = per_minute
        self._level = float(per_minute)
        self._at = now

    def wait_s(self, least: float, now: float) -> float:
        """Return the seconds until the level is at least ``least``; 0: it is."""
        if not self._per_minute:
            return 0.0
        self._refill(now)
        return max(0.0, least - self._level) * MINUTE_S / self._per_minute

    def take(self, amount: float, now: float) -> None:
        """Take an amount, or with a negative one give it back."""
        self._refill(now)
        self._level -= amount

    def _refill(self, now: float) -> None:
        earned = max(0.0, now - self._at) * self._per_minute / MINUTE_S
        self._level = min(self._per_minute, self._level + earned)
        self._at = now


class KeyUsage:
    """What one key uses of one server."""

    def __init__(self, key: NamedKey, now: float) -> None:
        self.key = key
        self._requests = Budget(key.requests_per_minute, now)
        self._tokens = Budget(key.tokens_per_minute, now)
        self._running = 0

    def begin(self, now: float) -> None:
        """Count a request that begins; ``end`` must follow.

        Raises:
            HttpError: with status 429 and the seconds to wait, if a limit is reached; then nothing
                is counted.
        """
        if self.key.concurrent and self._running >= self.key.concurrent:
            raise _quota_error(self.key.name, f"{self.key.concurrent} requests at once", 1.0)
        if wait_s := self._requests.wait_s(1, now):
            raise _quota_error(
                self.key.name, f"{self.key.requests_per_minute} requests per minute", wait_s
            )
        self._check_tokens(now)
        self._requests.take(1, now)
        self._running += 1

    def end(self) -> None:
        """Count a request that has ended."""
        self._running -= 1

    def reserve(self, tokens: int, now: float) -> None:
        """Take the most tokens that a request may use; one request may take more than there are,
        the next one waits.

        Raises:
            HttpError: with status 429, if other requests have used them all; then nothing is taken.
        """
        self._check_tokens(now)
        self._tokens.take(tokens, now)

    def give_back(self, tokens: int, now: float) -> None:
        """Return reserved tokens that were not used."""
        self._tokens.take(-tokens, now)

    def _check_tokens(self, now: float) -> None:
        if wait_s := self._tokens.wait_s(1, now):
            raise _quota_error(
                self.key.name, f"{self.key.tokens_per_minute} tokens per minute", wait_s
            )


def _quota_error(name: str, limit: str, wait_s: float) -> HttpError:
    message = f"the API key {name} is limited to {limit}; try again later"
    return HttpError(429, message, code="rate_limit_exceeded", retry_s=max(1, math.ceil(wait_s)))
