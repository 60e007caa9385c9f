"""A circuit breaker: when a hub stops taking a kind of work, and tries again. Pure."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Final, Literal

FIRST_PAUSE_S: Final = 2.0
LONGEST_PAUSE_S: Final = 300.0
MAX_CHARS: Final = 1000  # of a problem
# Deliveries after which a ticket that fails alone is to blame.
TRIES_ALONE: Final = 3
MAX_REMEMBERED: Final = 10_000  # failed tickets that may return

State = Literal["closed", "open", "probing"]


class CircuitBreaker:
    """Breaker of one kind of work in a hub: a domain, or a pool.

    While it is closed, work is taken. It opens when ``threshold`` deliveries in a row have failed.
    After a pause the hub makes a trial, which costs no ticket a delivery; a good one closes the
    breaker. Pauses double until real work succeeds. Times are seconds of any monotonic clock.

    It also decides whether a failure is the ticket's own: if other work or a trial has succeeded
    here since the ticket first failed, or if it has been tried often enough and nothing else fails
    here. Any other failure may be the host's, so the ticket goes to another hub.

    Args:
        threshold: deliveries that fail in a row before it opens.
        chance: shortens each pause by up to half, so that hubs that failed together do not return
            together.

    Attributes:
        state: ``probing`` while a trial runs.
        until: end of the pause.
    """

    def __init__(self, threshold: int, chance: random.Random | None = None) -> None:
        self.state: State = "closed"
        self.until = 0.0
        self._reason = ""  # what failed last
        # deliveries that opened it, trials that failed since
        self._num_failed = self._num_trials = 0
        self._threshold = threshold
        self._chance = chance or random.Random()
        self._pauses = 0  # since real work succeeded
        self._successes = 0
        # tickets and their deliveries since something succeeded
        self._failing: set[tuple[str, int]] = set()
        # Ticket -> successes when it first failed here.
        self._failed_at: dict[str, int] = {}

    @property
    def closed(self) -> bool:
        """Whether work is taken."""
        return self.state == "closed"

    @property
    def problem(self) -> str:
        """Why no work is taken, one line; empty if work is taken."""
        if self.closed:
            return ""
        trials = f" and {_count_noun(self._num_trials, 'trial')}" if self._num_trials else ""
        return (
            f"{_count_noun(self._num_failed, 'ticket')} in a row{trials} failed here, the last: "
            f"{self._reason}"
        )

    def succeeded(self) -> bool:
        """Note that real work succeeded. Return whether this closed the breaker."""
        self._successes += 1
        self._pauses = 0
        return self._close()

    def failed(self, ticket: str, delivery: int, reason: str, now: float) -> bool:
        """Note that work on a delivery failed. Return whether this opened the breaker."""
        if ticket not in self._failed_at:
            self._failed_at[ticket] = self._successes
            if len(self._failed_at) > MAX_REMEMBERED:
                del self._failed_at[next(iter(self._failed_at))]
        if not self.closed or self._successes > self._failed_at[ticket]:
            # It began before the breaker opened, or is the ticket's own.
            return False
        self._failing.add((ticket, delivery))
        if len(self._failing) < self._threshold:
            return False
        self._num_failed = len(self._failing)
        self._num_trials = 0
        self._open(reason, now)
        return True

    def blames(self, ticket: str, delivery: int) -> bool:
        """Decide whether the failure of this delivery is the ticket's own."""
        if self._successes > self._failed_at.get(ticket, self._successes):
            return True
        return delivery >= TRIES_ALONE and {failing for failing, _ in self._failing} == {ticket}

    def has_failed(self, ticket: str) -> bool:
        """Return whether a ticket has failed here and has not ended."""
        return ticket in self._failed_at

    def settled(self, ticket: str) -> None:
        """Note that a ticket has ended."""
        self._failed_at.pop(ticket, None)

    # -- trials

    def due(self, now: float) -> bool:
        """Return whether the pause is over and a trial may start."""
        return self.state == "open" and now >= self.until

    def probe(self) -> None:
        """Note that a trial starts."""
        assert self.state == "open", f"a trial starts while the breaker is {self.state}"
        self.state = "probing"

    def probed(self, good: bool | None, reason: str, now: float) -> bool:
        """Note that a trial ended. Return whether it closed the breaker.

        Args:
            good: whether it succeeded; None if that is unknown, for example because no server
                answered.
            reason: what failed.
        """
        if self.state != "probing":
            # Real work has closed it.
            return False
        if good:
            self._successes += 1  # from now on a ticket that fails again is to blame
            return self._close()
        if good is None:
            self._pauses -= 1  # the same pause again
            reason = self._reason
        else:
            self._num_trials += 1
        self._open(reason, now)
        return False

    def _close(self) -> bool:
        self._failing.clear()
        opened = self.state != "closed"
        self.state = "closed"
        return opened

    def _open(self, reason: str, now: float) -> None:
        longest = min(FIRST_PAUSE_S * 2.0 ** min(self._pauses, 30), LONGEST_PAUSE_S)
        self._pauses += 1
        self.state = "open"
        self._reason = " ".join(reason.split())
        self.until = now + longest * self._chance.uniform(0.5, 1.0)
        self._failing.clear()


def _count_noun(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


class CircuitBreakers:
    """The breakers of one hub, made on first use.

    Args:
        noun: what the keys are, for messages: ``domain`` or ``pool``.
        threshold: returns the threshold of a key, see ``CircuitBreaker``.
    """

    def __init__(self, noun: str, threshold: Callable[[str], int]) -> None:
        self._noun = noun
        self._threshold = threshold
        self._all: dict[str, CircuitBreaker] = {}

    def __getitem__(self, key: str) -> CircuitBreaker:
        if key not in self._all:
            self._all[key] = CircuitBreaker(self._threshold(key))
        return self._all[key]

    def forget(self, key: str) -> None:
        """Replace the breaker of a key by a new one."""
        self._all.pop(key, None)

    def closed(self, keys: Iterable[str]) -> list[str]:
        """Return those of the keys whose work is taken."""
        return [key for key in keys if self[key].closed]

    def problem(self, keys: Iterable[str]) -> str:
        """Return in one line why work of some keys is not taken; empty if all is taken."""
        return "; ".join(
            f"{self._noun} {key}: {self[key].problem}" for key in keys if not self[key].closed
        )[:MAX_CHARS]
