"""What is still to come of an answer, given its predicted length and what is there."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.contract.lengths import remaining_tokens

FEW, MANY = st.integers(0, 300), st.integers(0, 100_000)


def test_before_the_first_token_the_prediction_holds_within_the_limit() -> None:
    assert remaining_tokens(40, 90, 0, 1000) == (40, 90)
    assert remaining_tokens(40, 90, 0, 60) == (40, 60)
    assert remaining_tokens(40, 90, 0, 30) == (30, 30)
    assert remaining_tokens(40, 0, 0, 1000) == (40, 40)  # a prediction without an upper quantile


@pytest.mark.parametrize(("expected", "limit"), [(0, 100), (40, 0), (0, 0)])
def test_without_a_prediction_or_room_there_is_none(expected: int, limit: int) -> None:
    assert remaining_tokens(expected, 90, 7, limit) == (0, 0)


def test_at_the_median_the_upper_half_is_left() -> None:
    # median 100, 0.9 quantile 400: at 100 tokens the median of what is left is the 0.75 quantile,
    # the 0.9 quantile of what is left is the 0.95 quantile
    spread = math.log(4) / NormalDist().inv_cdf(0.9)
    whole = [100 * math.exp(spread * NormalDist().inv_cdf(p)) for p in (0.75, 0.95)]
    assert (
        remaining_tokens(100, 400, 100, 10_000)
        == (round(whole[0] - 100), round(whole[1] - 100))
        == (107, 493)
    )


@pytest.mark.parametrize("generated", [20, 100, 300, 900])
def test_the_quantiles_are_those_of_the_answers_that_got_so_far(generated: int) -> None:
    spread = math.log(4) / NormalDist().inv_cdf(0.9)
    lengths = 100 * np.exp(spread * np.random.default_rng(0).standard_normal(2_000_000))
    left = lengths[lengths > generated] - generated
    median, high = remaining_tokens(100, 400, generated, 10**9)
    assert np.mean(left <= median) == pytest.approx(0.5, abs=0.01)
    assert np.mean(left <= high) == pytest.approx(0.9, abs=0.01)


@given(expected=MANY, high=MANY, generated=MANY, limit=MANY)
def test_it_is_within_the_request_and_in_order(
    expected: int, high: int, generated: int, limit: int
) -> None:
    median, top = remaining_tokens(expected, high, generated, limit)
    if expected and limit:
        assert 1 <= median <= top <= limit
    else:
        assert (median, top) == (0, 0)


@given(expected=st.integers(1, 500), wider=st.integers(0, 2000), generated=st.integers(0, 20_000))
def test_the_whole_never_shrinks_while_the_answer_grows(
    expected: int, wider: int, generated: int
) -> None:
    one, other = (
        remaining_tokens(expected, expected + wider, at, 10**9) for at in (generated, generated + 1)
    )
    assert all(
        after + generated + 1 >= before + generated
        for before, after in zip(one, other, strict=True)
    )
