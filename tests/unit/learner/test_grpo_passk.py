"""The best of k by hand, and against all choices of the others."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.algorithm.advantages.grpo_passk import best_of_k_advantages


def plain(rewards: list[float], k: int | None) -> list[float]:
    return list(best_of_k_advantages(np.array(rewards), k, norm_std=False))


def test_whole_group_by_hand() -> None:
    # The best leads the second by 1; nobody else adds anything. Two equal bests add nothing.
    assert plain([3.0, 1.0, 2.0], None) == [1.0, 0.0, 0.0]
    assert plain([1.0, 1.0, 0.0], None) == [0.0, 0.0, 0.0]
    assert plain([1.0, 0.0], 5) == [1.0, 0.0]


def test_pairs_by_hand() -> None:
    # k = 2, one other: 3 leads 1 and 2 by 2 and 1, mean 1.5; 2 leads 1 by 1 and 3 by 0, mean 0.5.
    assert plain([3.0, 1.0, 2.0], 2) == pytest.approx([1.5, 0.0, 0.5])
    # Two successes of four: the other try is one of 1, 0, 0: (0 + 1 + 1) / 3.
    assert plain([1.0, 1.0, 0.0, 0.0], 2) == pytest.approx([2 / 3, 2 / 3, 0.0, 0.0])


def test_division_by_the_deviation() -> None:
    # 1, 0, 0, 0: mean 1/4, squares 9/16 + 3/16 = 3/4, over 3: std 1/2. 1 / (1/2 + 1e-6).
    found = best_of_k_advantages(np.array([1.0, 0.0, 0.0, 0.0]), 2)
    assert found == pytest.approx([1.999996, 0, 0, 0], abs=1e-9)


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=6), st.integers(2, 6))
def test_all_choices_of_the_others(rewards: list[float], k: int) -> None:
    num_others = min(k, len(rewards)) - 1
    for index, value in enumerate(plain(rewards, k)):
        others = rewards[:index] + rewards[index + 1 :]
        leads = [max(rewards[index] - max(c), 0.0) for c in combinations(others, num_others)]
        assert value == pytest.approx(float(np.mean(leads)), abs=1e-9)
