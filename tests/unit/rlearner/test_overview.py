"""The charts and tiles of a run's overview show declared metrics, by their titles."""

from __future__ import annotations

import pytest

from broker.telemetry.names import UNDECLARED, find_metric
from rlearner.console.pages.overview import ALWAYS_SHOWN, CURVES, SHARES, TILES


@pytest.mark.parametrize(
    "name", sorted({*TILES, *(name for _, names, _ in CURVES for name in names)})
)
def test_shown_metric_is_declared(name: str) -> None:
    assert find_metric(name).meaning != UNDECLARED


def test_titles_are_those_of_the_declarations() -> None:
    assert [title for title, _, _ in CURVES] == [
        "Reward",
        "Success rate",
        "Staleness in versions",
        "Idle share",
        "Tokens per second",
        "Seconds of a step",
        "Loss and KL",
        "Entropy and gradient norm",
        "Response length in tokens",
    ]
    assert [find_metric(name).title for name in TILES] == [
        "reward",
        "success rate",
        "largest staleness",
        "learner idle",
        "servers idle",
        "tokens per second",
        "entropy",
    ]


def test_shares_end_at_one() -> None:
    shares = {
        title: bounds for title, names, bounds in CURVES if find_metric(names[0]).unit == "share"
    }
    assert set(shares) == {"Success rate", "Idle share"}
    assert all(bounds == {"low": 0, "high": 1} for bounds in shares.values())
    assert all(find_metric(name).unit == "share" for name in SHARES)
    assert set(ALWAYS_SHOWN) <= {names[0] for _, names, _ in CURVES}
