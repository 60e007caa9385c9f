"""Curricula that cannot work are refused before a start, in one line."""

from __future__ import annotations

from typing import Any

import pytest

from broker.errors import ConfigError
from broker.settings.runspec import check_settings


def check(curriculum: dict[str, Any], **algorithm: Any) -> None:
    lake = {"env": "frozenlake", "curriculum": {"tasks": 10, **curriculum}}
    check_settings({"domains": {"lake": lake}, "algorithm": algorithm, "train": {"steps": 20}})


@pytest.mark.parametrize(
    ("curriculum", "message"),
    [
        ({"band": [0.8, 0.2]}, "curriculum.band: [0.8, 0.2] is not allowed; the lower"),
        ({"tasks": None}, "curriculum.tasks: None is not allowed; a number: environment froz"),
        (
            {"stages": [{"from_step": 0, "band": [0, 1]}]},
            "curriculum.stages.0.from_step: 0 is not allowed; above 0, the stage before, and",
        ),
        (
            {"stages": [{"from_step": 9, "band": [0, 1]}, {"from_step": 5, "band": [0, 1]}]},
            "curriculum.stages.1.from_step: 5 is not allowed; above 9",
        ),
        (
            {"stages": [{"from_step": 20, "band": [0, 1]}]},
            "curriculum.stages.0.from_step: 20 is not allowed; above 0, the stage before, and "
            "below train.steps, which is 20",
        ),
        (
            {"stages": [{"from_step": 5, "band": [1, 0]}]},
            "curriculum.stages.0.band: [1.0, 0.0] is not allowed",
        ),
        ({"pass_rates": "nowhere"}, "curriculum.pass_rates: 'nowhere' is not allowed"),
        ({"priority": "hardest"}, "curriculum.priority"),
    ],
)
def test_impossible_curricula(curriculum: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check(curriculum)
    assert f"domains.lake.{message}" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_groups_that_are_closed_early_measure_nothing() -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.close_early: True is not allowed; false"):
        check({}, close_early=True, pass_rate=[0.1, 0.9])


def test_possible_curriculum() -> None:
    check({"band": [0.2, 0.8], "stages": [{"from_step": 5, "band": [0.1, 0.5]}]})
