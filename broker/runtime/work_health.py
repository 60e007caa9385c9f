"""Which kinds of work succeed in this hub, on this host: opens and closes their breakers, makes the trials, and says
so.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Final, Literal

from broker.runtime.breaker import CircuitBreaker, CircuitBreakers

log = logging.getLogger(__name__)

LONGEST_DELAY_S: Final = 30.0  # before another hub gets a ticket that was handed back

Trial = Callable[[str, int], Awaitable[tuple[bool | None, str]]]


class WorkHealth:
    """The breakers of one hub.

    Args:
        noun: of a kind of work, for the texts: ``domain`` or ``pool``.
        keys: the kinds of work that the hub would do; may change.
        threshold: tickets that fail in a row before a kind of work counts as broken here, by kind.
        trial: tries one kind of work without a ticket, with the trial's number. Returns whether it went well, None if
        that does not tell,
            and what failed.
        changed: called when a kind of work breaks or works again.
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
        self._noun, self._keys, self._trial, self._changed = noun, keys, trial, changed
        self._breakers = CircuitBreakers(noun, threshold)
        self._trials: set[asyncio.Task[None]] = set()
        self._numbers = itertools.count()

    def takes(self, key: str) -> bool:
        """Whether work of this kind is taken."""
        return self._breakers[key].closed

    def blames(self, key: str, ticket: str, delivery: int) -> bool:
        """Whether the failure of a ticket's delivery is its own: see ``CircuitBreaker``."""
        return self._breakers[key].blames(ticket, delivery)

    def doubts(self, key: str, ticket: str) -> bool:
        """Whether a ticket has failed here and has not ended."""
        return self._breakers[key].doubts(ticket)

    def succeeded(self, key: str) -> None:
        """Real work ended as it should."""
        if self._breakers[key].succeeded():
            self._say_closed(key)

    def failed(self, key: str, ticket: str, delivery: int, why: str) -> None:
        """Work on a ticket's delivery failed."""
        breaker = self._breakers[key]
        if breaker.failed(ticket, delivery, why, time.monotonic()):
            log.error("%s %s: %s; taking no more of them until a trial goes well", self._noun, key, breaker.problem)
            self._changed()

    def settled(self, key: str, ticket: str) -> None:
        """A ticket has ended here."""
        self._breakers[key].settled(ticket)

    def renew(self, key: str) -> None:
        """Its settings have changed: what failed under the old ones says nothing about the new ones."""
        self._breakers.forget(key)

    def delay_s(self, key: str) -> float:
        """How long a ticket that is handed back is best kept from the hubs that may be broken, too."""
        return min(max(self._breakers[key].until - time.monotonic(), 0.0), LONGEST_DELAY_S)

    # -- trials

    def start_trials(self) -> None:
        """Start those that are due."""
        for key in self._keys:
            breaker = self._breakers[key]
            if breaker.due(time.monotonic()):
                breaker.probe()
                task = asyncio.create_task(self._try(key, breaker))
                self._trials.add(task)
                task.add_done_callback(self._trials.discard)

    async def close(self) -> None:
        """End the trials."""
        for task in self._trials:
            task.cancel()
        await asyncio.gather(*self._trials, return_exceptions=True)

    async def _try(self, key: str, breaker: CircuitBreaker) -> None:
        try:
            good, why = await self._trial(key, next(self._numbers))
        except Exception as error:
            # a fault of our own; the pauses bound how often it is told
            log.exception("%s %s: a trial", self._noun, key)
            good, why = False, f"{type(error).__name__}: {error}"
        if breaker.probed(good, why, time.monotonic()):
            self._say_closed(key)

    def _say_closed(self, key: str) -> None:
        log.info("%s %s works again; taking its tickets", self._noun, key)
        self._changed()

    # -- for presence

    @property
    def serves(self) -> list[str]:
        """The kinds of work that are taken."""
        return self._breakers.closed(self._keys)

    @property
    def problem(self) -> str:
        """Why those of the others are not, one line."""
        return self._breakers.problem(self._keys)

    @property
    def state(self) -> Literal["serving", "failed"]:
        """``failed`` where no kind of work is taken because all are broken."""
        return "failed" if self.problem and not self.serves else "serving"
