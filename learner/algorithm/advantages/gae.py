"""Generalized advantage estimation. Schulman et al. (arXiv 1506.02438)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from learner.algorithm.advantages.base import (
    AdvantageEstimate,
    BatchRow,
    FloatArray,
    row_discounts,
    whiten_arrays,
)
from learner.algorithm.traits import EstimatorTraits, declares
from learner.config import AlgorithmSection


def generalized_advantages(
    rewards: FloatArray, values: FloatArray, gamma: float | FloatArray, lam: float
) -> FloatArray:
    """Return ``A_t = sum over k of (gamma lam)^k delta_{t+k}``.

    There ``delta_t = r_t + gamma V_{t+1} - V_t``, and ``V_T = 0``.

    Args:
        rewards: (T,) of the sampled tokens in order, without the environment's between them.
        values: (T,) V_t, of the state in which token t was sampled.
        gamma: a number, or (T,), by which each token discounts what follows it.

    Returns:
        (T,), not whitened.
    """
    discounts = np.broadcast_to(gamma, values.shape)
    advantages = np.empty_like(values)
    running = 0.0
    next_value = 0.0
    for t in range(len(values) - 1, -1, -1):
        gamma_t = discounts[t]
        running = rewards[t] + gamma_t * next_value - values[t] + gamma_t * lam * running
        advantages[t] = running
        next_value = values[t]
    return advantages


@declares(EstimatorTraits(whole_batch=True, needs_critic=True, discounts=True))
def estimate(rows: Sequence[BatchRow], algorithm: AlgorithmSection) -> list[AdvantageEstimate]:
    """Return advantages whitened over the batch, and targets ``A + V`` before whitening."""
    raw_advantages = [
        generalized_advantages(
            row.rewards, _critic_values(row), row_discounts(row, algorithm), algorithm.gae_lambda
        )
        for row in rows
    ]
    targets = [
        advantages + _critic_values(row)
        for row, advantages in zip(rows, raw_advantages, strict=True)
    ]
    whitened = whiten_arrays(raw_advantages, [row.trained for row in rows])
    return [
        AdvantageEstimate(advantages, returns)
        for advantages, returns in zip(whitened, targets, strict=True)
    ]


def _critic_values(row: BatchRow) -> FloatArray:
    if row.values is None:
        raise ValueError("gae needs the values of a critic")
    return row.values
