"""Group-relative advantages: the difference from the group's mean, in standard deviations.

Shao et al., DeepSeekMath (arXiv 2402.03300), section 4.1; without the division: Liu et al. (arXiv
2503.20783).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from broker.contract import wire
from learner.algorithm.advantages.base import FloatArray, rewards_of, spread_over_tokens
from learner.algorithm.traits import EstimatorTraits, declares
from learner.config import AlgorithmSection

EPS: Final = 1e-6


def group_advantages(rewards: FloatArray, *, norm_std: bool = True) -> FloatArray:
    """Return ``(R - mean) / (std + 1e-6)`` with ddof 1; exactly 0 if all rewards are equal.

    Args:
        rewards: (group_size,) total rewards.
        norm_std: False omits the division.

    Returns:
        (group_size,)
    """
    if len(rewards) < 2 or rewards.min() == rewards.max():
        return np.zeros_like(rewards)
    scale = float(rewards.std(ddof=1)) + EPS if norm_std else 1.0
    centred: FloatArray = rewards - rewards.mean()
    return centred / scale


@declares(EstimatorTraits(compares_group=True, counts_episodes=True))
def estimate(
    trajectories: Sequence[wire.Trajectory], algorithm: AlgorithmSection
) -> list[FloatArray]:
    """Return the group's advantages on each trajectory's sampled tokens."""
    return spread_over_tokens(
        group_advantages(rewards_of(trajectories), norm_std=algorithm.norm_std), trajectories
    )
