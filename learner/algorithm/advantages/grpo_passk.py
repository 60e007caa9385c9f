"""Advantages of the best of k tries: an episode counts by what it adds to the others' best.

Tang et al. (arXiv 2503.19595) for the whole group; Walder and Karkhanis (arXiv 2505.15201) for any
number of tries.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import comb

import numpy as np

from broker.contract import wire
from learner.algorithm.advantages.base import FloatArray, rewards_of, spread_over_tokens
from learner.algorithm.advantages.grpo import EPS
from learner.algorithm.traits import EstimatorTraits, declares
from learner.config import AlgorithmSection


def best_of_k_advantages(
    rewards: FloatArray, k: int | None, *, norm_std: bool = True
) -> FloatArray:
    """Return the mean of ``max(R_i, m) - m`` over all choices of k - 1 others, m their best.

    It is the leave-one-out estimate of the gradient of the expected best of k, in expectation times
    1/k. With k = group size only the best episode has an advantage, its lead over the second.

    Args:
        rewards: (group_size,) total rewards.
        k: at least 2; None, or more than the group's size, means all of the group.
        norm_std: divide by the group's standard deviation (ddof 1) plus 1e-6.

    Returns:
        (group_size,), at least 0; exactly 0 if all rewards are equal.
    """
    n = len(rewards)
    if n < 2 or rewards.min() == rewards.max():
        return np.zeros_like(rewards)
    num_others = min(k or n, n) - 1
    # Of n - 1 ascending rewards, the chance that the j-th (from 0) is the best of the chosen ones.
    chances = np.array([comb(j, num_others - 1) for j in range(n - 1)]) / comb(n - 1, num_others)
    order = np.argsort(rewards, kind="stable")
    ascending = rewards[order]
    leads = np.empty_like(rewards)
    for place, index in enumerate(order):
        others = np.delete(ascending, place)
        leads[index] = chances @ np.maximum(rewards[index] - others, 0.0)
    scale = float(rewards.std(ddof=1)) + EPS if norm_std else 1.0
    return leads / scale


@declares(EstimatorTraits(compares_group=True, counts_episodes=True, takes_pass_k=True))
def estimate(
    trajectories: Sequence[wire.Trajectory], algorithm: AlgorithmSection
) -> list[FloatArray]:
    """Return the group's advantages on each trajectory's sampled tokens."""
    advantages = best_of_k_advantages(
        rewards_of(trajectories), algorithm.pass_k, norm_std=algorithm.norm_std
    )
    return spread_over_tokens(advantages, trajectories)
