"""Watches which work succeeds in this hub: breakers, trials, reported problems."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Final, Literal

from broker.errors import described
from broker.runtime.breaker import CircuitBreaker, CircuitBreakers
from broker.system.recent_warning import forget_warning

log = logging.getLogger(__name__)

LONGEST_DELAY_S: Final = 30.0  # before another hub gets a ticket that was handed back

Trial = Callable[[str, int], Awaitable[tuple[bool | None, str]]]


class WorkHealth:
    """The breakers of one hub.

    Args:
        noun: of a kind of work, for messages: ``domain`` or ``pool``.
        keys: kinds of work that the hub would do; may change.
        threshold: returns how many tickets in a row must fail before a kind of work counts as
            broken here.
        trial: tries a kind of work without a ticket, given the trial's number. Returns whether it
            succeeded, None if unknown, and what failed.
        changed: called when a kind of work breaks or recovers.
    """

    def __init__(
        self,
        noun: str,
        keys: Iterable[str],
        threshold: Callable[[str], int],
        *,
        trial: Trial,
        changed: Callable[[], None],
    ) -> None:
        self._noun = noun
        self._keys = keys
        self._trial = trial
        self._changed = changed
        self._breakers = CircuitBreakers(noun, threshold)
        self._trials: set[asyncio.Task[None]] = set()
        self._numbers = itertools.count()

    def takes(self, key: str) -> bool:
        """Return whether work of this kind is taken."""
        return self._breakers[key].closed

    def blames(self, key: str, ticket: str, delivery: int) -> bool:
        """Decide whether the failure of a ticket's delivery is its own: see ``CircuitBreaker``."""
        return self._breakers[key].blames(ticket, delivery)

    def has_failed(self, key: str, ticket: str) -> bool:
        """Return whether a ticket has failed here and has not ended."""
        return self._breakers[key].has_failed(ticket)

    def succeeded(self, key: str) -> None:
        """Note that real work succeeded."""
        if self._breakers[key].succeeded():
            self._say_closed(key)

    def failed(self, key: str, ticket: str, delivery: int, reason: str) -> None:
        """Note that work on a ticket's delivery failed."""
        breaker = self._breakers[key]
        if breaker.failed(ticket, delivery, reason, time.monotonic()):
            log.error(
                "%s %s: %s; taking no more of them until a trial succeeds",
                self._noun,
                key,
                breaker.problem,
            )
            self._changed()

    def settled(self, key: str, ticket: str) -> None:
        """Note that a ticket has ended here."""
        self._breakers[key].settled(ticket)

    def renew(self, key: str) -> None:
        """Forget the failures under previous settings."""
        self._breakers.forget(key)

    def delay_s(self, key: str) -> float:
        """Return how many seconds to keep a returned ticket from other hubs, perhaps broken too."""
        return min(max(self._breakers[key].until - time.monotonic(), 0.0), LONGEST_DELAY_S)

    # -- trials

    def start_trials(self) -> None:
        for key in self._keys:
            breaker = self._breakers[key]
            if breaker.due(time.monotonic()):
                breaker.probe()
                task = asyncio.create_task(self._try(key, breaker))
                self._trials.add(task)
                task.add_done_callback(self._trials.discard)

    async def close(self) -> None:
        """Cancel the trials."""
        for task in self._trials:
            task.cancel()
        await asyncio.gather(*self._trials, return_exceptions=True)

    async def _try(self, key: str, breaker: CircuitBreaker) -> None:
        try:
            good, reason = await self._trial(key, next(self._numbers))
        except Exception as error:
            # an internal fault; the pauses bound how often it is logged
            log.exception("%s %s: a trial", self._noun, key)
            good = False
            reason = described(error)
        if breaker.probed(good, reason, time.monotonic()):
            self._say_closed(key)

    def _say_closed(self, key: str) -> None:
        log.info("%s %s works again; taking its tickets", self._noun, key)
        forget_warning(log)
        self._changed()

    # -- for presence

    @property
    def serves(self) -> list[str]:
        """The kinds of work that are taken."""
        return self._breakers.closed(self._keys)

    @property
    def problem(self) -> str:
        """Why the others are not, one line."""
        return self._breakers.problem(self._keys)

    @property
    def state(self) -> Literal["serving", "failed"]:
        """``failed`` if all kinds of work are broken."""
        return "failed" if self.problem and not self.serves else "serving"
