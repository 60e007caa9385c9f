"""A small soak in virtual time; the large one is ``python -m bench.scale soak``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from bench.scale import soak
from learner.credit.tickets import TicketAges

Waiting = Mapping[int, str]


@pytest.fixture
def soaked(monkeypatch: pytest.MonkeyPatch) -> Callable[[], dict[str, Any]]:
    """Runs 40 steps: 2 pauses of 8 hours, hubs away for a day, a domain renamed."""
    for name, value in {"STEPS": 40, "RENAME_AT": 20, "PAUSE_AT": (10, 25), "AWAY_AT": (15,)}.items():
        monkeypatch.setattr(soak, name, value)
    return lambda: dict(soak.measure()["soak"])


def test_no_ticket_dies_of_waiting(soaked: Callable[[], dict[str, Any]]) -> None:
    found = soaked()
    assert (found["steps"], found["dead"], found["lost"]) == (40, 0, 0)
    assert found["reasons"].keys() == {"removed"}
    assert 0 < found["dropped"] <= 5 * soak.GROUPS


@pytest.mark.parametrize("ignored", ["paused", "served", "delivered"])
def test_the_soak_notices_tickets_that_age_while_they_wait(
    soaked: Callable[[], dict[str, Any]], monkeypatch: pytest.MonkeyPatch, ignored: str
) -> None:
    passed = TicketAges.passed
    everything: dict[str, Any] = {
        "paused": False,
        "served": {"lake", "maze", "mine"},
        "delivered": dict.fromkeys(("lake", "maze", "mine"), 1 << 60),
    }

    def careless(
        self: TicketAges, elapsed_s: float, waiting: Waiting, delivered: Any, served: Any, *, paused: bool = False
    ) -> list[int]:
        seen = {"delivered": delivered, "served": served, "paused": paused} | {ignored: everything[ignored]}
        return passed(self, elapsed_s, waiting, seen["delivered"], seen["served"], paused=seen["paused"])

    monkeypatch.setattr(TicketAges, "passed", careless)
    assert soaked()["dead"] > 0
