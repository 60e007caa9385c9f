"""On-policy optimization with the baseline of least variance: rewards weighted by length.

Hao et al. (arXiv 2505.23585).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from broker.contract import wire
from learner.algorithm.advantages.base import FloatArray, rewards_of, spread_over_tokens
from learner.algorithm.traits import EstimatorTraits, declares
from learner.config import AlgorithmSection


def length_weighted_advantages(rewards: FloatArray, lengths: FloatArray) -> FloatArray:
    """Return ``R_i - sum_j l_j R_j / sum_j l_j``; exactly 0 for equal rewards.

    The baseline that minimises the variance of the gradient weighs rewards by the squared norm of
    the score; the paper takes that to grow with the length.

    Args:
        rewards: (group_size,) total rewards.
        lengths: (group_size,) sampled tokens of the episodes.

    Returns:
        (group_size,); 0 for a group of one.
    """
    total = float(lengths.sum())
    if len(rewards) < 2 or total == 0 or rewards.min() == rewards.max():
        return np.zeros_like(rewards)
    return rewards - float(lengths @ rewards) / total


@declares(EstimatorTraits(compares_group=True, counts_episodes=True))
def estimate(
    trajectories: Sequence[wire.Trajectory], algorithm: AlgorithmSection
) -> list[FloatArray]:
    """Return the group's advantages on each trajectory's sampled tokens."""
    lengths = dict.fromkeys((trajectory.episode for trajectory in trajectories), 0.0)
    for trajectory in trajectories:
        lengths[trajectory.episode] += float(trajectory.loss_mask.array().sum())
    advantages = length_weighted_advantages(
        rewards_of(trajectories), np.array(list(lengths.values()))
    )
    return spread_over_tokens(advantages, trajectories)
