"""When a hub stops taking work that fails, when it tries again, and whose fault a failure is."""

from __future__ import annotations

import random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from broker.runtime.breaker import (
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    MAX_REMEMBERED,
    TRIES_ALONE,
    CircuitBreaker,
    CircuitBreakers,
)


class Longest(random.Random):
    """Shortens no pause."""

    def uniform(self, a: float, b: float) -> float:
        return b


def opened(threshold: int = 3, now: float = 0.0) -> CircuitBreaker:
    breaker = CircuitBreaker(threshold, Longest())
    assert [breaker.failed(f"t{n}", 1, "no\n disk", now) for n in range(threshold)] == [False] * (
        threshold - 1
    ) + [True]
    return breaker


def test_it_opens_after_so_many_deliveries_in_a_row_and_says_why() -> None:
    breaker = CircuitBreaker(3)
    assert breaker.failed("a", 1, "x", 0.0) is False
    # many episodes of one ticket
    assert [breaker.failed("a", 1, "x", 0.0) for _ in range(50)] == [False] * 50
    assert breaker.failed("a", 2, "x", 0.0) is False
    assert breaker.succeeded() is False
    assert [breaker.failed(name, 1, "no\n disk", 0.0) for name in "bcd"] == [False, False, True]
    assert breaker.problem == "3 tickets in a row failed here, the last: no disk"
    assert breaker.failed("e", 1, "late", 0.0) is False  # was under way
    assert breaker.problem.endswith("no disk")


def test_pauses_double_until_real_work_succeeds() -> None:
    breaker, now, pauses = opened(), 0.0, []
    for _ in range(10):
        pauses.append(breaker.until - now)
        now = breaker.until
        assert not breaker.due(now - 0.01)
        assert breaker.due(now)
        breaker.probe()
        assert not breaker.due(now)
        assert breaker.probed(False, "still no disk", now) is False
    assert pauses[:4] == [FIRST_PAUSE_S * 2**n for n in range(4)]
    assert pauses[-1] == LONGEST_PAUSE_S
    assert (
        breaker.problem == "3 tickets in a row and 10 trials failed here, the last: still no disk"
    )
    now = breaker.until
    breaker.probe()
    assert breaker.probed(True, "", now) is True
    assert (breaker.state, breaker.problem) == ("closed", "")
    assert [breaker.failed(name, 1, "again", now) for name in "xyz"][-1] is True
    assert breaker.until - now == LONGEST_PAUSE_S  # a trial that went well is not work that did
    assert breaker.succeeded() is True
    assert [breaker.failed(name, 1, "again", now) for name in "uvw"][-1] is True
    assert breaker.until - now == FIRST_PAUSE_S


def test_a_trial_that_does_not_tell_is_made_again_after_the_same_pause() -> None:
    breaker = opened()
    breaker.probe()
    assert breaker.probed(None, "no server", 10.0) is False
    assert breaker.until == 10.0 + FIRST_PAUSE_S
    assert breaker.problem == "3 tickets in a row failed here, the last: no disk"


def test_real_work_that_ends_well_during_a_trial_closes_it() -> None:
    breaker = opened()
    breaker.probe()
    assert breaker.succeeded() is True
    assert breaker.probed(False, "x", 1.0) is False
    assert breaker.closed


def test_a_ticket_is_to_blame_only_if_other_work_succeeded_since_its_first_failure() -> None:
    breaker = CircuitBreaker(99)
    breaker.succeeded()
    assert not breaker.blames("a", 1)
    breaker.failed("a", 1, "x", 0.0)
    breaker.failed("a", 1, "x", 0.0)
    assert not breaker.blames("a", 1)
    breaker.succeeded()
    assert breaker.blames("a", 1)
    breaker.failed("b", 1, "x", 0.0)
    assert not breaker.blames("b", 1)
    breaker.settled("a")
    breaker.failed("a", 2, "x", 0.0)
    assert not breaker.blames("a", 1)


def test_a_ticket_that_fails_again_and_again_is_to_blame_while_nothing_else_fails() -> None:
    breaker = CircuitBreaker(99)
    for delivery in range(1, TRIES_ALONE + 1):
        breaker.failed("a", delivery, "x", 0.0)
        assert breaker.blames("a", delivery) is (delivery == TRIES_ALONE)
    breaker.failed("b", 1, "x", 0.0)
    assert not breaker.blames("a", TRIES_ALONE)


def test_a_ticket_that_fails_although_a_trial_went_well_is_to_blame() -> None:
    """Else a few bad tickets of a domain, with nothing good among them, would be handed back until
    their deliveries ran out.
    """
    breaker = opened()
    assert not breaker.blames("t0", 1)
    breaker.probe()
    breaker.probed(False, "no", 8.0)
    assert not breaker.blames("t0", 1)
    breaker.probe()
    breaker.probed(True, "", 99.0)
    assert breaker.blames("t0", 2)
    assert not breaker.blames("new", 1)


def test_it_remembers_so_many_tickets_and_no_more() -> None:
    breaker = CircuitBreaker(10 * MAX_REMEMBERED)
    for number in range(MAX_REMEMBERED + 1):
        breaker.failed(str(number), 1, "x", 0.0)
    breaker.succeeded()
    assert (
        breaker.blames("0", 1),
        breaker.blames("1", 1),
        breaker.blames(str(MAX_REMEMBERED), 1),
    ) == (
        False,
        True,
        True,
    )


def test_the_problem_of_a_hub_names_what_does_not_work() -> None:
    breakers = CircuitBreakers("domain", lambda _: 1)
    assert (breakers.closed(["a", "b"]), breakers.problem(["a", "b"])) == (["a", "b"], "")
    breakers["b"].failed("t", 1, "no", 0.0)
    assert (breakers.closed(["a", "b"]), breakers.problem(["a", "b"])) == (
        ["a"],
        "domain b: 1 ticket in a row failed here, the last: no",
    )


class Interleavings(RuleBasedStateMachine):
    """Deliveries that end well or badly while trials run, on a clock that only goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.breaker, self.now, self.delivery = CircuitBreaker(3, random.Random(0)), 0.0, 0
        # deliveries that failed since the newest success, while it was closed
        self.row: set[int] = set()
        # ticket -> whether something succeeded, or a trial did, since its first failure
        self.first: dict[str, bool] = {}

    @rule()
    def success(self) -> None:
        was_closed = self.breaker.closed
        assert self.breaker.succeeded() is not was_closed
        self.row.clear()
        self.first = dict.fromkeys(self.first, True)

    @rule(ticket=st.sampled_from("abcd"), again=st.booleans())
    def failure(self, ticket: str, again: bool) -> None:
        self.delivery += not again
        was_closed = self.breaker.closed
        opened = self.breaker.failed(ticket, self.delivery, "x", self.now)
        own = self.first.setdefault(ticket, False)
        if was_closed and not own:
            self.row.add(hash((ticket, self.delivery)))
            assert opened == (len(self.row) >= 3)
        else:
            assert not opened
        if opened:
            self.row.clear()
            assert FIRST_PAUSE_S / 2 <= self.breaker.until - self.now <= LONGEST_PAUSE_S

    @rule(seconds=st.floats(0.0, 400.0))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: self.breaker.due(self.now))
    @rule()
    def trial(self) -> None:
        self.breaker.probe()

    @precondition(lambda self: self.breaker.state == "probing")
    @rule(good=st.sampled_from([True, False, None]))
    def trial_ends(self, good: bool | None) -> None:
        assert self.breaker.probed(good, "y", self.now) is bool(good)
        assert self.breaker.closed is bool(good)
        if good:
            self.row.clear()
            self.first = dict.fromkeys(self.first, True)

    @rule(ticket=st.sampled_from("abcd"))
    def ticket_ends(self, ticket: str) -> None:
        self.breaker.settled(ticket)
        self.first.pop(ticket, None)

    @invariant()
    def it_never_stays_open_for_ever(self) -> None:
        if self.breaker.state == "open":
            assert self.breaker.until - self.now <= LONGEST_PAUSE_S
            assert self.breaker.problem
        assert bool(self.breaker.problem) is not self.breaker.closed

    @invariant()
    def only_evidence_blames(self) -> None:
        for ticket in "abcd":
            assert self.breaker.blames(ticket, 1) == self.first.get(ticket, False)


Interleavings.TestCase.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
TestInterleavings = Interleavings.TestCase
