"""IcePop: masks tokens on which trainer and generator disagree. Ling team (arXiv 2510.18855)."""

from __future__ import annotations

from learner.algorithm.corrections.base import (
    CorrectionInputs,
    CorrectionResult,
    clamped_exp,
    log_ratio,
    mask_weights,
)
from learner.config import AlgorithmSection


def icepop(facts: CorrectionInputs, algorithm: AlgorithmSection) -> CorrectionResult:
    """Weight tokens by ``p/β`` within [correction_low, correction_high], by 0 outside."""
    raw = clamped_exp(log_ratio(facts, "token"))
    return mask_weights(
        facts, raw, (raw >= algorithm.correction_low) & (raw <= algorithm.correction_high)
    )
