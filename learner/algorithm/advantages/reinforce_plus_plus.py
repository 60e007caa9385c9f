"""REINFORCE++ and its variant with a group baseline: no critic, whitened over the whole batch. Hu et al. (arXiv 2501.03262)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from learner.algorithm.advantages.base import Estimate, FloatArray, Row, discounted, whiten, whole_batch
from learner.config import AlgorithmSection


@whole_batch
def estimate(rows: Sequence[Row], algorithm: AlgorithmSection) -> list[Estimate]:
    """A ``BatchEstimator``: discounted return-to-go of the tokens' rewards, the KL penalty among them, whitened over the batch."""
    returns = [discounted(row.rewards, algorithm.gamma) for row in rows]
    return [Estimate(advantages) for advantages in whiten(returns, [row.trained for row in rows])]


@whole_batch
def estimate_baseline(rows: Sequence[Row], algorithm: AlgorithmSection) -> list[Estimate]:
    """A ``BatchEstimator``: the row's total minus its group's mean, on every token, whitened over the batch."""
    centred = minus_group_mean(np.array([row.rewards.sum() for row in rows]), [row.group for row in rows])
    tokens = [np.full(len(row.rewards), value) for row, value in zip(rows, centred, strict=True)]
    return [Estimate(advantages) for advantages in whiten(tokens, [row.trained for row in rows])]


def minus_group_mean(rewards: FloatArray, groups: Sequence[int]) -> FloatArray:
    """Each reward minus the mean of those of its group, (B,); equal rewards, and a group of one, give exactly 0."""
    names, centred = np.array(groups), np.zeros_like(rewards)
    for name in np.unique(names):
        members = rewards[names == name]
        if members.min() != members.max():
            centred[names == name] = members - members.mean()
    return centred
