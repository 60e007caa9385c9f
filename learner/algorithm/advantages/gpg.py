"""Group policy gradient: centred rewards, corrected for groups that say nothing.

Chu et al. (arXiv 2504.02546).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from learner.algorithm.advantages.base import AdvantageEstimate, BatchRow, FloatArray
from learner.algorithm.advantages.grpo import group_advantages
from learner.algorithm.traits import EstimatorTraits, declares
from learner.config import AlgorithmSection


def gradient_scale(groups: Sequence[int], advantages: FloatArray) -> float:
    """Return ``B / (B - M)``: B rows, M of them in groups whose advantages are all 0; 1 if all are.

    Args:
        groups: (B,) group of each row.
        advantages: (B,)
    """
    informative = set(np.array(groups)[advantages != 0].tolist())
    num_informative = sum(group in informative for group in groups)
    if not num_informative:
        return 1.0
    return len(groups) / num_informative


@declares(EstimatorTraits(whole_batch=True, compares_group=True))
def estimate(rows: Sequence[BatchRow], algorithm: AlgorithmSection) -> list[AdvantageEstimate]:
    """Return ``alpha (R - mean) / F`` on every token.

    alpha is ``gradient_scale`` over the trained rows of the step: groups of equal rewards have no
    gradient and would only make the mean over the batch smaller. F is 1, or with ``norm_std`` the
    group's standard deviation plus 1e-6; the paper recommends 1.
    """
    totals = np.array([row.rewards.sum() for row in rows])
    groups = np.array([row.group for row in rows])
    values = np.zeros_like(totals)
    for group in np.unique(groups):
        members = groups == group
        values[members] = group_advantages(totals[members], norm_std=algorithm.norm_std)
    trained = np.array([row.trained for row in rows], dtype=bool)
    values[~trained] = 0.0
    values *= gradient_scale(groups[trained].tolist(), values[trained])
    return [
        AdvantageEstimate(np.full(len(row.rewards), value))
        for row, value in zip(rows, values, strict=True)
    ]
