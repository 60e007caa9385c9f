"""REINFORCE++, also with a group baseline: no critic, whitened over the batch.

Hu et al. (arXiv 2501.03262).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from learner.algorithm.advantages.base import (
    AdvantageEstimate,
    BatchRow,
    FloatArray,
    discounted_returns,
    row_discounts,
    whiten_arrays,
)
from learner.algorithm.traits import EstimatorTraits, declares
from learner.config import AlgorithmSection


@declares(EstimatorTraits(whole_batch=True, discounts=True))
def estimate(rows: Sequence[BatchRow], algorithm: AlgorithmSection) -> list[AdvantageEstimate]:
    """Return the discounted return-to-go, KL penalty included, whitened over the batch."""
    returns = [discounted_returns(row.rewards, row_discounts(row, algorithm)) for row in rows]
    return [
        AdvantageEstimate(advantages)
        for advantages in whiten_arrays(returns, [row.trained for row in rows])
    ]


@declares(EstimatorTraits(whole_batch=True, compares_group=True))
def estimate_baseline(
    rows: Sequence[BatchRow], algorithm: AlgorithmSection
) -> list[AdvantageEstimate]:
    """Return the row's total minus its group's mean on every token, whitened over the batch."""
    centred = minus_group_mean(
        np.array([row.rewards.sum() for row in rows]), [row.group for row in rows]
    )
    tokens = [np.full(len(row.rewards), value) for row, value in zip(rows, centred, strict=True)]
    return [
        AdvantageEstimate(advantages)
        for advantages in whiten_arrays(tokens, [row.trained for row in rows])
    ]


def minus_group_mean(rewards: FloatArray, groups: Sequence[int]) -> FloatArray:
    """Return each reward minus its group's mean, (B,); exactly 0 if a group's are equal."""
    group_ids = np.array(groups)
    centred = np.zeros_like(rewards)
    for group in np.unique(group_ids):
        members = rewards[group_ids == group]
        if members.min() != members.max():
            centred[group_ids == group] = members - members.mean()
    return centred
