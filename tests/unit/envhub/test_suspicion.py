"""Which deliveries of a ticket are played alone, and which are not played any more."""

from __future__ import annotations

import pytest

from broker.contract.wire import Attempt
from envhub.tickets.suspicion import TicketJudgement, judge


def playing(deaths: int, *, alone: bool = False) -> Attempt:
    return Attempt(deaths=deaths, hub="h", process="p", alone=alone)


@pytest.mark.parametrize(
    ("num_delivered", "past", "died", "expected"),
    [
        (1, None, False, TicketJudgement(0)),
        (2, None, False, TicketJudgement(1)),  # the first hub left no note: it may have died
        # what nobody played was handed back by whoever fetched it
        (9, None, False, TicketJudgement(1)),
        (2, Attempt(deaths=0), False, TicketJudgement(0)),  # handed back
        (3, playing(0), True, TicketJudgement(1)),
        (3, playing(1), True, TicketJudgement(2)),
        (3, playing(1), False, TicketJudgement(1)),  # cut off for a while, not dead
        (4, playing(2, alone=True), True, TicketJudgement(3, poisonous=True)),
        (4, playing(2, alone=True), False, TicketJudgement(2)),
        # a hub that was to play it alone drained
        (9, Attempt(deaths=2), False, TicketJudgement(2)),
    ],
)
def test_a_delivery_is_judged_by_who_died(
    num_delivered: int, past: Attempt | None, died: bool, expected: TicketJudgement
) -> None:
    assert judge(num_delivered, past, died=died) == expected


def test_two_deaths_make_a_ticket_suspect() -> None:
    assert [TicketJudgement(deaths).alone for deaths in range(4)] == [False, False, True, True]


def test_a_ticket_that_kills_everyone_kills_three() -> None:
    past, deaths, delivery = None, 0, 1
    while not (verdict := judge(delivery, past, died=past is not None)).poisonous:
        if delivery > 1:
            past = Attempt(deaths=verdict.deaths, hub="h", process="p", alone=verdict.alone)
        deaths, delivery = deaths + 1, delivery + 1
    assert (deaths, verdict.deaths) == (3, 3)
