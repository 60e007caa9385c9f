"""Return-to-go without a baseline, undiscounted. Williams, Machine Learning 8 (1992)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from broker import wire
from learner.advantages.base import FloatArray
from learner.config import AlgorithmSection


def returns_to_go(turn_rewards: FloatArray, total: float) -> FloatArray:
    """What each turn can still influence: its own reward and all later ones.

    Args:
        turn_rewards: (num_turns,) what the environment gave for each turn, at least one.
        total: the trajectory's reward; what the turns do not account for (reward hubs) came after the last one.

    Returns:
        (num_turns,)
    """
    rewards = turn_rewards.copy()
    rewards[-1] += total - turn_rewards.sum()
    return np.cumsum(rewards[::-1])[::-1]


def estimate(trajectories: Sequence[wire.Trajectory], algorithm: AlgorithmSection) -> list[FloatArray]:
    """An ``Estimator``: each sampled token gets its turn's return-to-go."""
    return [_one(trajectory) for trajectory in trajectories]


def _one(trajectory: wire.Trajectory) -> FloatArray:
    values = np.zeros(len(trajectory.loss_mask.array()))
    if trajectory.turns:
        rewards = np.array([turn.reward for turn in trajectory.turns])
        for turn, value in zip(trajectory.turns, returns_to_go(rewards, trajectory.reward), strict=True):
            values[turn.start : turn.end] = value
    return values
