"""Discounted return-to-go without a baseline. Williams, Machine Learning 8 (1992)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from broker.contract import wire
from learner.algorithm.advantages.base import (
    FloatArray,
    discounted_returns,
    sampled_positions,
    step_discounts,
    token_rewards,
    token_turns,
)
from learner.algorithm.traits import EstimatorTraits, declares
from learner.config import AlgorithmSection


@declares(EstimatorTraits(discounts=True))
def estimate(
    trajectories: Sequence[wire.Trajectory], algorithm: AlgorithmSection
) -> list[FloatArray]:
    """Return each sampled token's return-to-go, discounted by ``gamma`` per token or turn.

    A turn's reward comes with its last token, so without a discount every token of a turn has the
    turn's return-to-go.
    """
    return [_returns_to_go(trajectory, algorithm) for trajectory in trajectories]


def _returns_to_go(trajectory: wire.Trajectory, algorithm: AlgorithmSection) -> FloatArray:
    discounts = step_discounts(token_turns(trajectory), algorithm)
    values = np.zeros(len(trajectory.loss_mask.array()))
    values[sampled_positions(trajectory)] = discounted_returns(token_rewards(trajectory), discounts)
    return values
