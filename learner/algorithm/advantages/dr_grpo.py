"""Group-relative advantages without the standard deviation. Liu et al. (arXiv 2503.20783)."""

from __future__ import annotations

from collections.abc import Sequence

from broker.contract import wire
from learner.algorithm.advantages import grpo
from learner.algorithm.advantages.base import FloatArray, rewards_of, spread_over_tokens
from learner.algorithm.traits import EstimatorTraits, declares
from learner.config import AlgorithmSection


@declares(EstimatorTraits(compares_group=True, counts_episodes=True))
def estimate(
    trajectories: Sequence[wire.Trajectory], algorithm: AlgorithmSection
) -> list[FloatArray]:
    """Return ``R - mean`` on each sampled token; to combine with seq-mean-token-sum-norm."""
    return spread_over_tokens(
        grpo.group_advantages(rewards_of(trajectories), norm_std=False), trajectories
    )
