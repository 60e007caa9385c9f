"""A weight and rejections that are set apart: each at its own level, by its own bounds.

Liu, Li et al., "When speed kills stability" (2025); Li et al., "Trust region masking" (arXiv
2512.23075).
"""

from __future__ import annotations

import torch
from torch import Tensor

from learner.algorithm.corrections.base import (
    CorrectionInputs,
    CorrectionResult,
    clamped_exp,
    log_ratio,
)
from learner.algorithm.losses.base import MAX_LOG_RATIO
from learner.algorithm.sequences import sequence_max, sequence_mean, sequence_sum
from learner.config import AlgorithmSection, RejectionSection


def composed(facts: CorrectionInputs, algorithm: AlgorithmSection) -> CorrectionResult:
    """Weight by ``min(p/β, correction_high)`` at ``correction_level``; 0 where a criterion rejects.

    Level ``none`` weighs all alike. A token must be accepted by all of ``rejections``.
    """
    weights = torch.ones_like(facts.proximal_logprobs)
    clipped = torch.zeros_like(weights, dtype=torch.bool)
    if algorithm.correction_level != "none":
        raw = clamped_exp(log_ratio(facts, algorithm.correction_level))
        weights = raw.clamp_max(algorithm.correction_high)
        clipped = raw > algorithm.correction_high
    accepted = torch.ones_like(clipped)
    for rejection in algorithm.rejections:
        accepted &= is_accepted(facts, rejection)
    return CorrectionResult(
        facts.proximal_logprobs,
        torch.where(accepted, weights, 0.0),
        clipped & accepted,
        ~accepted,
    )


def is_accepted(facts: CorrectionInputs, rejection: RejectionSection) -> Tensor:
    """Return whether a criterion accepts each token, (T,) bool.

    k1: the ratio p/β at the level lies in [low, high]. k2 (``(log p/β)^2 / 2``) and k3 (``p/β - 1 -
    log p/β``): the divergence at the level is at most high, in nats.
    """
    if rejection.estimator == "k1":
        ratio = clamped_exp(log_ratio(facts, rejection.level))
        return (ratio >= (rejection.low or 0.0)) & (ratio <= rejection.high)
    return divergence_values(facts, rejection.estimator, rejection.level) <= rejection.high


def divergence_values(facts: CorrectionInputs, estimator: str, level: str) -> Tensor:
    """Return k2 or k3 of each token, or its sequence's sum, mean or maximum, (T,), in nats.

    Args:
        level: token, sequence (the sum), geometric (the mean) or max.
    """
    log = log_ratio(facts, "token")
    if estimator == "k2":
        values = 0.5 * torch.square(log)
    else:
        values = log.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp() - 1 - log
    if level == "token":
        return values
    reduce = {"sequence": sequence_sum, "geometric": sequence_mean, "max": sequence_max}[level]
    return reduce(values, facts.sequence, facts.num_sequences)
