"""Selects the groups of a step that are trained on, as StarPO-S does. Pure.

Wang et al., RAGEN (arXiv 2504.20073).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from broker.contract import wire
from learner.algorithm.advantages.base import rewards_of


def most_varied(groups: Sequence[wire.Group], keep_fraction: float) -> list[wire.Group]:
    """Return the ``ceil(keep_fraction * n)`` groups of the highest reward variance, in order.

    Of equal ones the first are returned.

    Args:
        keep_fraction: above 0, at most 1.
    """
    count = num_kept(len(groups), keep_fraction)
    variances = [_reward_variance(group) for group in groups]
    best = sorted(range(len(groups)), key=lambda i: (-variances[i], i))[:count]
    return [groups[i] for i in sorted(best)]


def num_kept(num_groups: int, keep_fraction: float) -> int:
    """Return how many of a step's groups are trained on: ``ceil(keep_fraction * num_groups)``."""
    # 0.3 * 10 is slightly more than 3.
    return math.ceil(keep_fraction * num_groups - 1e-9)


def _reward_variance(group: wire.Group) -> float:
    last = {
        trajectory.episode: trajectory for trajectory in group.trajectories if not trajectory.greedy
    }
    rewards = rewards_of(list(last.values()))
    return float(np.var(rewards, ddof=1)) if len(rewards) > 1 else 0.0
