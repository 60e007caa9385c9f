"""Masked importance sampling: masks tokens too far from the sampling policy, and weights the rest.

Liu, Li et al., "When speed kills stability: demystifying RL collapse from the training-inference
mismatch" (2025); estimators of the divergence by Schulman, "Approximating KL divergence" (2020).
"""

from __future__ import annotations

from learner.algorithm.corrections.base import (
    CorrectionInputs,
    CorrectionResult,
    clamped_exp,
    log_ratio,
    mask_weights,
)
from learner.algorithm.corrections.composed import divergence_values
from learner.config import AlgorithmSection


def mis(facts: CorrectionInputs, algorithm: AlgorithmSection) -> CorrectionResult:
    """Return ``p/β`` at ``correction_level`` where the mask accepts it, 0 elsewhere.

    The mask looks at ``mis_mask_level``, by default the same level. With ``mis_estimator`` k1 the
    ratio there must lie in [correction_low, correction_high]; with k2 (``(log p/β)^2 / 2``) and k3
    (``p/β - 1 - log p/β``) the divergence of the token, or its sum (sequence) or mean (geometric)
    over the sequence, must not exceed correction_high.
    """
    level = algorithm.mis_mask_level or algorithm.correction_level
    weight = clamped_exp(log_ratio(facts, algorithm.correction_level))
    if algorithm.mis_estimator == "k1":
        ratio = clamped_exp(log_ratio(facts, level))
        return mask_weights(
            facts,
            weight,
            (ratio >= algorithm.correction_low) & (ratio <= algorithm.correction_high),
        )
    return mask_weights(
        facts,
        weight,
        divergence_values(facts, algorithm.mis_estimator, level) <= algorithm.correction_high,
    )
