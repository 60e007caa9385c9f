"""Trains on a teacher's scores: on-policy distillation (Agarwal et al., GKD, arXiv 2306.13649).

The policy samples, the teacher scores. Per token, log beta - log T estimates the reverse divergence
KL(policy || teacher), where beta is the distribution sampled from. As an advantage, its negative
credits each token with what the teacher thinks of it, without a discount: the gradient of a
sequence's divergence, less the terms in which a token changes later ones.
"""

from __future__ import annotations

import numpy as np

from broker.contract import wire
from learner.algorithm.advantages.base import FloatArray
from learner.config import AlgorithmSection, DistillationSection


def add_teacher(
    advantages: FloatArray, trajectory: wire.Trajectory, section: DistillationSection
) -> FloatArray:
    """Return a trajectory's advantages with its teacher's part.

    ``reward_coef * A + coef * clip(log T - log beta)`` with ``use: advantage``, the first term
    alone with ``use: loss``; ``A`` where no teacher has scored the trajectory.

    Args:
        advantages: (n,) from rewards, 0 where masked.
    """
    if trajectory.teacher is None:
        return advantages
    rewarded = section.reward_coef * advantages
    if section.use == "loss":
        return rewarded
    mask = trajectory.loss_mask.array().astype(bool)
    gap = trajectory.teacher.logprobs.array().astype(np.float64) - trajectory.logprobs.array()
    if section.clip is not None:
        gap = gap.clip(-section.clip, section.clip)
    return np.where(mask, rewarded + section.coef * gap, 0.0)


def trains_divergence(algorithm: AlgorithmSection) -> bool:
    """Return whether a teacher's divergence is part of the loss, where a sample has one."""
    return algorithm.distillation.use == "loss" and algorithm.distillation.coef > 0
