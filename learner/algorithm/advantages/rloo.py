"""Leave-one-out advantages: each reward against the mean of the others. Ahmadian et al. (arXiv 2402.14740)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from broker.contract import wire
from learner.algorithm.advantages.base import FloatArray, rewards_of, spread
from learner.config import AlgorithmSection


def advantages(rewards: FloatArray) -> FloatArray:
    """``R_i - mean of R_j over j != i``; equal rewards, and a group of one, give exactly 0.

    Args:
        rewards: (group_size,) total rewards.

    Returns:
        (group_size,)
    """
    n = len(rewards)
    if n < 2 or rewards.min() == rewards.max():
        return np.zeros_like(rewards)
    others: FloatArray = (rewards.sum() - rewards) / (n - 1)
    return rewards - others


def estimate(trajectories: Sequence[wire.Trajectory], algorithm: AlgorithmSection) -> list[FloatArray]:
    """An ``Estimator``: the group's advantages, spread over each trajectory's sampled tokens."""
    return spread(advantages(rewards_of(trajectories)), trajectories)
