"""The baseline of least variance at each token, from the scores' norms.

Li et al., "The optimal token baseline" (arXiv 2602.07078).
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
)
from learner.algorithm.traits import EstimatorTraits, declares
from learner.config import AlgorithmSection


def token_advantages(
    returns: Sequence[FloatArray], energies: Sequence[FloatArray]
) -> list[FloatArray]:
    """Return ``G_t - B_t``, where ``B_t = sum_i G_t^i W_t^i / sum_i W_t^i`` over a group's rows.

    ``W_t = sum over j <= t of ||s_j||^2`` is the energy of a row up to its t-th sampled token, and
    ``||s_j||^2 = 1 - 2 pi_j + sum over v of pi_v^2`` the squared norm of the gradient of the
    token's logprob by the logits, which stands for that by the weights. Rows that have ended do not
    count. Where only one row goes on, its baseline is 0, as in the authors' code.

    Args:
        returns: (T,) of each row, G_t, the return-to-go.
        energies: (T,) of each row, ``||s_t||^2``.

    Returns:
        (T,) of each row; exactly 0 where the returns of several rows are equal, and in a group of
        one.
    """
    if len(returns) < 2:
        return [np.zeros_like(row) for row in returns]
    weights = [np.cumsum(row) for row in energies]
    advantages = [np.zeros_like(row) for row in returns]
    for t in range(max(map(len, returns))):
        alive = [i for i, row in enumerate(returns) if len(row) > t]
        goals = np.array([returns[i][t] for i in alive])
        if len(alive) > 1 and goals.min() == goals.max():
            continue
        baseline = 0.0
        if len(alive) > 1:
            shares = np.array([weights[i][t] for i in alive])
            total = float(shares.sum())
            # All tokens so far were certain: there is nothing to weigh by.
            baseline = float(shares @ goals) / total if total > 0 else float(goals.mean())
        for i, goal in zip(alive, goals, strict=True):
            advantages[i][t] = goal - baseline
    return advantages


@declares(
    EstimatorTraits(whole_batch=True, compares_group=True, discounts=True, needs_energies=True)
)
def estimate(rows: Sequence[BatchRow], algorithm: AlgorithmSection) -> list[AdvantageEstimate]:
    """Return each token's return-to-go minus the optimal baseline of its group.

    Raises:
        ValueError: if the models have not measured the energies.
    """
    groups: dict[int, list[int]] = {}
    for index, row in enumerate(rows):
        groups.setdefault(row.group, []).append(index)
    estimates = [AdvantageEstimate(np.zeros(0))] * len(rows)
    for indices in groups.values():
        members = [rows[i] for i in indices]
        returns = [
            discounted_returns(row.rewards, row_discounts(row, algorithm)) for row in members
        ]
        advantages = token_advantages(returns, [_row_energies(row) for row in members])
        for index, row, values in zip(indices, members, advantages, strict=True):
            estimates[index] = AdvantageEstimate(values if row.trained else np.zeros_like(values))
    return estimates


def _row_energies(row: BatchRow) -> FloatArray:
    if row.energies is None:
        raise ValueError("optimal_token_baseline needs the energies of the sampled tokens")
    return row.energies
