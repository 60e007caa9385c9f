"""ReMax: a greedy episode of the task is the baseline. Li et al. (arXiv 2310.10505)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from broker.contract import wire
from learner.algorithm.advantages.base import FloatArray, rewards_of, spread_over_tokens
from learner.algorithm.traits import EstimatorTraits, declares
from learner.config import AlgorithmSection


def advantages_over_greedy(rewards: FloatArray, greedy_reward: float) -> FloatArray:
    """Return ``R - R_greedy``, (group_size,)."""
    return rewards - greedy_reward


@declares(EstimatorTraits(greedy_baseline=True))
def estimate(
    trajectories: Sequence[wire.Trajectory], algorithm: AlgorithmSection
) -> list[FloatArray]:
    """Return rewards minus the mean of the group's greedy episodes, which get 0 themselves.

    A KL penalty in the reward applies to greedy episodes, too (``learner.algorithm.assembly``). A
    group without a greedy episode (it did not end in time) has no baseline, and all its advantages
    are 0.
    """
    is_greedy = np.array(
        list({trajectory.episode: trajectory.greedy for trajectory in trajectories}.values()),
        dtype=bool,
    )
    rewards = rewards_of(trajectories)
    if not is_greedy.any():
        return spread_over_tokens(np.zeros_like(rewards), trajectories)
    return spread_over_tokens(
        np.where(is_greedy, 0.0, advantages_over_greedy(rewards, float(rewards[is_greedy].mean()))),
        trajectories,
    )
