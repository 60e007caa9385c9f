"""MaxRL's advantages by hand."""

from itertools import product

import numpy as np
import pytest

from learner.algorithm.advantages.maxrl import mean_normalized_advantages


def test_hard_tasks_weigh_more() -> None:
    # One success of four: mean 1/4, (1 - 1/4) / (1/4) = 3, (0 - 1/4) / (1/4) = -1. Three of four:
    # mean 3/4: 1/3, and -1.
    assert mean_normalized_advantages(np.array([1.0, 0.0, 0.0, 0.0])) == pytest.approx(
        [3.0, -1.0, -1.0, -1.0]
    )
    assert mean_normalized_advantages(np.array([1.0, 1.0, 1.0, 0.0])) == pytest.approx(
        [1 / 3, 1 / 3, 1 / 3, -1.0]
    )


@pytest.mark.parametrize("rewards", [[0.0, 0.0], [0.3, 0.3], [-1.0, 0.5], [1.0]])
def test_groups_that_say_nothing_give_zero(rewards: list[float]) -> None:
    assert not mean_normalized_advantages(np.array(rewards)).any()


def test_expectation_is_the_truncated_gradient_of_log_p() -> None:
    # Three tries, success p = 0.3, scores dlog P(try)/dp: 1/p for a success, -1/(1 - p) for a failure.
    # log p = -(1 - p) - (1 - p)^2 / 2 - ..., so its gradient up to order 2 is 1 + 0.7 = 1.7, and
    # the mean of A_i s_i over the tries must have that expectation.
    p = 0.3
    total = 0.0
    for outcome in product((1.0, 0.0), repeat=3):
        rewards = np.array(outcome)
        scores = np.where(rewards == 1, 1 / p, -1 / (1 - p))
        chance = np.prod(np.where(rewards == 1, p, 1 - p))
        total += float(chance * (mean_normalized_advantages(rewards) * scores).mean())
    assert total == pytest.approx(1.7)
