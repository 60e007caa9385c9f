"""Generalized advantage estimation. Schulman et al. (arXiv 1506.02438)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from learner.algorithm.advantages.base import AdvantageEstimate, BatchRow, FloatArray, whiten
from learner.algorithm.traits import EstimatorTraits, declares
from learner.config import AlgorithmSection


def gae(rewards: FloatArray, values: FloatArray, gamma: float, lam: float) -> FloatArray:
    """Return ``A_t = sum over k of (gamma lam)^k delta_{t+k}``, ``delta_t = r_t + gamma V_{t+1} -
    V_t``, ``V_T = 0``.

    Args:
        rewards: (T,) of the sampled tokens in order; the environment's tokens between them are
            skipped.
        values: (T,) V_t, of the state in which token t was sampled.

    Returns:
        (T,), not whitened.
    """
    advantages = np.empty_like(values)
    running = following = 0.0
    for t in range(len(values) - 1, -1, -1):
        running = rewards[t] + gamma * following - values[t] + gamma * lam * running
        advantages[t] = running
        following = values[t]
    return advantages


@declares(EstimatorTraits(whole_batch=True, needs_critic=True))
def estimate(rows: Sequence[BatchRow], algorithm: AlgorithmSection) -> list[AdvantageEstimate]:
    """Return advantages whitened over the batch, and value targets ``A + V`` before whitening; a
    ``BatchEstimator``.
    """
    plain = [gae(row.rewards, _values(row), algorithm.gamma, algorithm.gae_lambda) for row in rows]
    targets = [advantages + _values(row) for row, advantages in zip(rows, plain, strict=True)]
    white = whiten(plain, [row.trained for row in rows])
    return [
        AdvantageEstimate(advantages, returns)
        for advantages, returns in zip(white, targets, strict=True)
    ]


def _values(row: BatchRow) -> FloatArray:
    if row.values is None:
        raise ValueError("gae needs the values of a critic")
    return row.values
