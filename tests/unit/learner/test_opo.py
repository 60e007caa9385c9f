"""OPO's baseline by hand."""

import numpy as np
import pytest
from test_more_advantages import trajectory

from learner.algorithm.advantages import opo
from learner.config import AlgorithmSection


def test_baseline_is_weighted_by_length() -> None:
    # Rewards 1 and 0 on 3 and 1 tokens: b = 3/4. What the environment says has no length.
    group = [
        trajectory([(1, 3, 0.0, ""), (5, 6, 1.0, "")], 7, episode=0),
        trajectory([(1, 2, 0.0, "")], 2, episode=1),
    ]
    long, short = opo.estimate(group, AlgorithmSection())
    assert long.tolist() == [0, 0.25, 0.25, 0, 0, 0.25, 0]
    assert short.tolist() == [0, -0.75]


def test_equal_rewards_and_groups_of_one_give_exactly_zero() -> None:
    lengths = np.array([3.0, 7.0, 11.0])
    assert not opo.length_weighted_advantages(np.full(3, 0.1), lengths).any()
    assert not opo.length_weighted_advantages(np.array([2.0]), np.array([3.0])).any()
    # with equal lengths it is the plain mean
    assert opo.length_weighted_advantages(
        np.array([3.0, 1.0, 2.0]), np.full(3, 4.0)
    ) == pytest.approx([1.0, -1.0, 0.0])
