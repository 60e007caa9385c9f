"""Discounted return-to-go without a baseline. Williams, Machine Learning 8 (1992)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from broker.contract import wire
from learner.algorithm.advantages.base import (
    FloatArray,
    discounted_returns,
    sampled_positions,
    token_rewards,
)
from learner.algorithm.traits import EstimatorTraits, declares
from learner.config import AlgorithmSection


@declares(EstimatorTraits())
def estimate(
    trajectories: Sequence[wire.Trajectory], algorithm: AlgorithmSection
) -> list[FloatArray]:
    """Return each sampled token's return-to-go, discounted by ``gamma`` per sampled token.

    A turn's reward comes with its last token, so without a discount every token of a turn has the
    turn's return-to-go.
    """
    return [_returns_to_go(trajectory, algorithm.gamma) for trajectory in trajectories]


def _returns_to_go(trajectory: wire.Trajectory, gamma: float) -> FloatArray:
    values = np.zeros(len(trajectory.loss_mask.array()))
    values[sampled_positions(trajectory)] = discounted_returns(token_rewards(trajectory), gamma)
    return values
