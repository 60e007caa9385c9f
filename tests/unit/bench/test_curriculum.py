"""Samples to the same success, by hand."""

from __future__ import annotations

import pytest

from bench.curriculum import compare_arms, curve_of, samples_until

NONE = [(0.0, 0.1), (100.0, 0.3), (200.0, 0.5)]


def test_samples_between_two_measurements() -> None:
    # 0.4 is halfway between the second and the third
    assert samples_until(NONE, 0.4) == 150
    assert samples_until(NONE, 0.1) == 0
    with pytest.raises(ValueError, match="never reaches"):
        samples_until(NONE, 0.6)


def test_success_that_both_have_reached() -> None:
    # The curriculum reaches 0.5 with 100 + 100 * 0.1 / 0.2 = 150 samples, none with 200.
    row = compare_arms(NONE, [(0.0, 0.1), (100.0, 0.4), (200.0, 0.6)])
    assert row == {
        "success": 0.5,
        "samples": {"none": 200, "curriculum": 150},
        "samples_ratio": 0.75,
    }


def test_arms_that_learn_nothing_have_no_ratio() -> None:
    assert compare_arms(NONE, [(0.0, 0.1), (100.0, 0.11)])["samples_ratio"] is None


def test_samples_are_all_episodes_that_were_played() -> None:
    result = {"consumed": {"10": 160, "0": 0}, "points": {"10": 0.5, "0": 0.1}}
    assert curve_of(result, 8) == [(0, 0.1), (1280, 0.5)]
