"""avg@k, pass@k and the interval, against numbers worked out by hand and against counting."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.evaluation import pass_at_k


@given(st.lists(st.booleans(), min_size=1, max_size=7), st.data())
def test_pass_at_k_is_the_share_of_all_choices_of_k_tries_with_a_right_one(
    tries: list[bool], data: st.DataObject
) -> None:
    k = data.draw(st.integers(1, len(tries)))
    chosen = [any(some) for some in itertools.combinations(tries, k)]
    assert pass_at_k.pass_at_k(len(tries), sum(tries), k) == pytest.approx(
        sum(chosen) / len(chosen)
    )


@pytest.mark.parametrize(("n", "c", "k"), [(4, 1, 0), (4, 1, 5), (4, 5, 1), (4, -1, 1)])
def test_what_is_not_defined_is_refused(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match="not defined"):
        pass_at_k.pass_at_k(n, c, k)


def test_values_of_four_tries() -> None:
    # Right: 1 of 4, 0 of 4, 4 of 4. avg = (1/4 + 0 + 1) / 3. pass@2 of the first: 1 - C(3,2)/C(4,2)
    # = 1 - 3/6.
    tasks = [[True, False, False, False], [False] * 4, [True] * 4]
    assert pass_at_k.pass_at_k_metrics(tasks) == pytest.approx(
        {"avg@4": 1.25 / 3, "pass@1": 1.25 / 3, "pass@2": 1.5 / 3, "pass@4": 2 / 3}
    )


def test_a_task_that_lost_a_try_does_not_count() -> None:
    assert pass_at_k.pass_at_k_metrics([[True, False], [False]]) == {
        "avg@2": 0.5,
        "pass@1": 0.5,
        "pass@2": 1.0,
    }


def test_nothing_is_said_of_single_tries() -> None:
    assert pass_at_k.pass_at_k_metrics([[True], [False]]) == {}
    assert pass_at_k.pass_at_k_metrics([]) == {}


def test_six_tries_show_powers_of_two_and_all() -> None:
    assert pass_at_k.reported_ks(6) == [1, 2, 4, 6]
    assert pass_at_k.reported_ks(8) == [1, 2, 4, 8]


def test_the_interval_of_single_tries_is_wilsons() -> None:
    # n = 100, p = 0.2, z = 1.959964: centre (0.2 + 0.0192073) / 1.0384146 = 0.211098,
    # half 1.959964 * sqrt(0.0016 + 0.0000960365) / 1.0384146
    low, high = pass_at_k.success_interval([[True]] * 20 + [[False]] * 80)
    assert low == pytest.approx(0.13337, abs=1e-5)
    assert high == pytest.approx(0.28883, abs=1e-5)


def test_the_interval_of_several_tries_goes_by_tasks() -> None:
    # Means 0, 0.5, 1: mean 0.5, standard deviation 0.5, half width 1.959964 * 0.5 / sqrt(3) =
    # 0.5658, cut at 0 and 1.
    assert pass_at_k.success_interval([[False, False], [True, False], [True, True]]) == (0.0, 1.0)
    low, high = pass_at_k.success_interval([[True, False]] * 50)
    assert (low, high) == (0.5, 0.5)
    # mean 0.75, sd 0.25126, half 0.049246
    low, high = pass_at_k.success_interval([[True, True], [True, False]] * 50)
    assert (low, high) == (pytest.approx(0.700754, abs=1e-6), pytest.approx(0.799246, abs=1e-6))
