"""Group reward-decoupled normalization: several rewards compared apart. Liu et al. (2601.05242).

GRPO normalizes the sum of the rewards, so that a group cannot tell which of them an episode got.
GDPO normalizes each reward over the group first, sums the results, and normalizes the sums over the
batch, so that their size does not grow with the number of rewards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from broker.errors import ConfigError
from learner.algorithm.advantages.base import (
    AdvantageEstimate,
    BatchRow,
    FloatArray,
    whiten_arrays,
)
from learner.algorithm.advantages.grpo import group_advantages
from learner.algorithm.traits import EstimatorTraits, declares
from learner.config import AlgorithmSection


@declares(EstimatorTraits(whole_batch=True, compares_group=True, reads_parts=True))
def estimate(rows: Sequence[BatchRow], algorithm: AlgorithmSection) -> list[AdvantageEstimate]:
    """Return each row's sum of normalized rewards, normalized over the rows, on all its tokens.

    The batch's mean and standard deviation (ddof 1, eps 1e-8) count each trained row once, however
    long it is; they are 0 and 1 if all sums are equal.

    Raises:
        ConfigError: if a group has none of the rewards that ``gdpo_weights`` names.
    """
    sums = np.zeros(len(rows))
    groups = np.array([row.group for row in rows])
    for group in np.unique(groups):
        members = np.flatnonzero(groups == group).tolist()
        sums[members] = weighted_advantages(
            [rows[member].parts for member in members],
            algorithm.gdpo_weights,
            norm_std=algorithm.norm_std,
        )
    normalized = whiten_arrays(list(sums[:, None]), [row.trained for row in rows])
    return [
        AdvantageEstimate(np.full(len(row.rewards), float(value[0])))
        for row, value in zip(rows, normalized, strict=True)
    ]


def weighted_advantages(
    parts: Sequence[Mapping[str, float]],
    weights: Mapping[str, float] | None,
    *,
    norm_std: bool = True,
) -> FloatArray:
    """Return ``sum over k of w_k (r_k - mean_k) / (std_k + 1e-6)`` for the episodes of a group.

    A reward that is equal in all episodes adds 0. One that an episode lacks counts as 0 there.

    Args:
        parts: rewards of each episode by name.
        weights: of the rewards that count; None: 1 for each but notes, whose names have a slash.
        norm_std: False omits the division.

    Returns:
        (group_size,)

    Raises:
        ConfigError: if no episode has a reward that counts.
    """
    names = dict.fromkeys(name for episode in parts for name in episode)
    if weights is None:
        weights = {name: 1.0 for name in names if "/" not in name}
    counted = [name for name in names if name in weights]
    if not counted:
        allowed = f"names of rewards that a group has: {', '.join(names) or 'it has none'}"
        raise ConfigError("algorithm.gdpo_weights", dict(weights), allowed)
    total = np.zeros(len(parts))
    for name in counted:
        rewards = np.array([episode.get(name, 0.0) for episode in parts])
        total += weights[name] * group_advantages(rewards, norm_std=norm_std)
    return total
