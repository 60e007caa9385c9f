"""Leave-one-out advantages: each reward minus the others' mean.

Ahmadian et al. (arXiv 2402.14740).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from broker.contract import wire
from learner.algorithm.advantages.base import FloatArray, rewards_of, spread_over_tokens
from learner.algorithm.traits import EstimatorTraits, declares
from learner.config import AlgorithmSection


def leave_one_out_advantages(rewards: FloatArray) -> FloatArray:
    """Return ``R_i - mean of R_j over j != i``; exactly 0 for equal rewards and for a group of one.

    Args:
        rewards: (group_size,) total rewards.

    Returns:
        (group_size,)
    """
    n = len(rewards)
    if n < 2 or rewards.min() == rewards.max():
        return np.zeros_like(rewards)
    baselines: FloatArray = (rewards.sum() - rewards) / (n - 1)
    return rewards - baselines


@declares(EstimatorTraits(compares_group=True, counts_episodes=True))
def estimate(
    trajectories: Sequence[wire.Trajectory], algorithm: AlgorithmSection
) -> list[FloatArray]:
    """Return the group's advantages on each trajectory's sampled tokens."""
    return spread_over_tokens(leave_one_out_advantages(rewards_of(trajectories)), trajectories)
