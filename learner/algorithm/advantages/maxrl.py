"""Maximum likelihood reinforcement learning: hard tasks weigh more.

Tajwar et al. (arXiv 2602.02710).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from broker.contract import wire
from learner.algorithm.advantages.base import FloatArray, rewards_of, spread_over_tokens
from learner.algorithm.traits import EstimatorTraits, declares
from learner.config import AlgorithmSection

LEAST_MEAN: Final = 1e-6


def mean_normalized_advantages(rewards: FloatArray) -> FloatArray:
    """Return ``(R - mean) / mean``; 0 for equal rewards and for a mean of at most 1e-6.

    With rewards of 0 and 1 and a group of N the expected gradient is that of log p, p the chance of
    success, whose series in 1 - p ends at order N - 1; that of RLOO is the gradient of p.

    Args:
        rewards: (group_size,) total rewards, at least 0.

    Returns:
        (group_size,)
    """
    mean = float(rewards.mean()) if len(rewards) > 1 else 0.0
    if mean <= LEAST_MEAN or rewards.min() == rewards.max():
        return np.zeros_like(rewards)
    return (rewards - mean) / mean


@declares(EstimatorTraits(compares_group=True, counts_episodes=True, divides_by_mean=True))
def estimate(
    trajectories: Sequence[wire.Trajectory], algorithm: AlgorithmSection
) -> list[FloatArray]:
    """Return the group's advantages on each trajectory's sampled tokens."""
    return spread_over_tokens(mean_normalized_advantages(rewards_of(trajectories)), trajectories)
