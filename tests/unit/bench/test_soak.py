"""A small soak in virtual time; the large one is ``python -m bench.scale soak``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from bench.scale import soak
from bench.scale.virtual_fleet import SoakFleet, SoakHub
from learner.credit.tickets import TicketAges

Waiting = Mapping[int, str]


@pytest.fixture
def soaked(monkeypatch: pytest.MonkeyPatch) -> Callable[[], dict[str, Any]]:
    """Runs 40 steps: 2 pauses of 8 hours, hubs and reward hubs away for a day, slow scoring, a
    domain renamed.
    """
    small = {
        "STEPS": 40,
        "RENAME_AT": 20,
        "PAUSE_AT": (10, 25),
        "AWAY_AT": (15,),
        "REWARDS_AWAY_AT": (5,),
    }
    for name, value in (small | {"SLOW_AT": (28, 36), "PAUSE_EVERY_S": 7_200.0}).items():
        monkeypatch.setattr(soak, name, value)
    return lambda: dict(soak.measure()["soak"])


def test_no_ticket_dies_of_waiting(soaked: Callable[[], dict[str, Any]]) -> None:
    found = soaked()
    assert (found["steps"], found["dead"], found["lost"]) == (40, 0, 0)
    assert (found["reward_outage_h"], found["slow_scoring"]) == (24.0, True)
    assert found["hub_pauses"] > 5
    assert found["reasons"].keys() == {"removed"}
    assert 0 < found["dropped"] <= 5 * soak.GROUPS
    assert soaked() == found, "the same seeds, another course"


def test_the_soak_notices_hubs_that_close_what_others_play(
    soaked: Callable[[], dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the abandoning, and with clocks that run on, hubs that wake find their groups beyond
    the deadline.
    """

    async def careless(fleet: SoakFleet, hub: SoakHub) -> None:
        if hub.lapsed:
            hub.lapsed = []
            hub.clock_s += 3_600.0
        await turn(fleet, hub)

    turn = SoakFleet._turn
    monkeypatch.setattr(SoakFleet, "_turn", careless)
    assert soaked()["reasons"].keys() >= {"deadline"}


@pytest.mark.parametrize("ignored", ["paused", "reports"])
def test_the_soak_notices_tickets_that_age_while_they_wait(
    soaked: Callable[[], dict[str, Any]], monkeypatch: pytest.MonkeyPatch, ignored: str
) -> None:
    """Without one of its inputs, tickets expire that hubs hold in a pause, or that no hub works on."""
    passed, expired = TicketAges.passed, list[int]()

    def careless(
        self: TicketAges,
        elapsed_s: float,
        waiting: Waiting,
        reports: Any,
        served: Any,
        *,
        paused: bool = False,
    ) -> list[int]:
        everything: dict[str, Any] = {"paused": False, "reports": {"hubs": list(waiting)}}
        seen = {"reports": reports, "paused": paused} | {ignored: everything[ignored]}
        expired.extend(
            passed(self, elapsed_s, waiting, seen["reports"], served, paused=seen["paused"])
        )
        return []

    monkeypatch.setattr(TicketAges, "passed", careless)
    soaked()
    assert expired
