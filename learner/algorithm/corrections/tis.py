"""Truncated importance sampling.

Ionides, Journal of Computational and Graphical Statistics 17 (2008).
Yao et al., "Your efficient RL framework secretly brings you off-policy training" (2025).
"""

from __future__ import annotations

from learner.algorithm.corrections.base import (
    CorrectionInputs,
    CorrectionResult,
    clamped_exp,
    log_ratio,
)
from learner.config import AlgorithmSection


def tis(facts: CorrectionInputs, algorithm: AlgorithmSection) -> CorrectionResult:
    """Weight by ``min(p/β, correction_high)`` of the token, the sequence or its geometric mean."""
    raw = clamped_exp(log_ratio(facts, algorithm.correction_level))
    weights = raw.clamp_max(algorithm.correction_high)
    clipped = raw > algorithm.correction_high
    return CorrectionResult(
        facts.proximal_logprobs, weights, clipped, clipped.new_zeros(clipped.shape)
    )
