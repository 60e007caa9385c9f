"""The figures of the self-play bench, from made-up rows, by hand."""

from __future__ import annotations

import pytest

from bench.selfplay import GAMES, SUCCESS, summarize, wilson_interval
from broker.errors import UserError

TICKETS = {
    "ticket/issued": 20.0,
    "ticket/trained": 16.0,
    "ticket/filtered": 1.0,
    "ticket/dropped": 1.0,
    "ticket/dead": 1.0,
    "ticket/open": 0.0,
}


def test_losses_at_start_and_end() -> None:
    rows = [
        {"step": 1, SUCCESS: 0.4, GAMES: 500.0},
        {"step": 2},
        {"step": 4, SUCCESS: 0.97, GAMES: 500.0, **TICKETS},
    ]
    figures = summarize(rows, 256)
    assert figures == {
        "selfplay_random_loss": 0.03,
        "interval": wilson_interval(0.03, 500),
        "loss_start": 0.6,
        "games": 500,
        "steps": 4,
        "episodes": 1024,
        # 20 issued, and 19 of them counted
        "lost": 1,
        "dead": 1,
    }


def test_the_interval_of_a_share() -> None:
    # Wilson (1927): 0 of 10 has an upper bound of z^2 / (n + z^2)
    assert wilson_interval(0.0, 10) == [0.0, pytest.approx(3.8416 / 13.8416, abs=1e-4)]
    low, high = wilson_interval(0.5, 100)
    assert (low, high) == (pytest.approx(0.4038, abs=1e-4), pytest.approx(0.5962, abs=1e-4))


def test_a_run_without_an_evaluation() -> None:
    with pytest.raises(UserError, match="no evaluation against a random player"):
        summarize([{"step": 1, **TICKETS}], 1)
