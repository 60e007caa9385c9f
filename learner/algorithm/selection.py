"""Which of a step's groups are trained on. Pure. Wang et al., RAGEN (arXiv 2504.20073): StarPO-S."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from broker.contract import wire
from learner.algorithm.advantages.base import rewards_of


def most_varied(groups: Sequence[wire.Group], keep_fraction: float) -> list[wire.Group]:
    """The groups of highest reward variance, in their own order: ``ceil(keep_fraction * n)`` of n; of equals the earlier ones.

    Args:
        keep_fraction: above 0, at most 1.
    """
    count = num_kept(len(groups), keep_fraction)
    spreads = [_variance(group) for group in groups]
    best = sorted(range(len(groups)), key=lambda i: (-spreads[i], i))[:count]
    return [groups[i] for i in sorted(best)]


def num_kept(num_groups: int, keep_fraction: float) -> int:
    """How many of a step's groups are trained on: ``ceil(keep_fraction * num_groups)``."""
    return math.ceil(keep_fraction * num_groups - 1e-9)  # 0.3 * 10 is a little more than 3


def _variance(group: wire.Group) -> float:
    last = {trajectory.episode: trajectory for trajectory in group.trajectories if not trajectory.greedy}
    rewards = rewards_of(list(last.values()))
    return float(np.var(rewards, ddof=1)) if len(rewards) > 1 else 0.0
