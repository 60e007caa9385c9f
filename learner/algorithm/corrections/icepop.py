"""IcePop: masks tokens on which trainer and generator disagree. Ling team (arXiv 2510.18855)."""

from __future__ import annotations

from learner.algorithm.corrections.base import (
    CorrectionInputs,
    CorrectionResult,
    exp,
    keep,
    log_ratio,
)
from learner.config import AlgorithmSection


def icepop(facts: CorrectionInputs, algorithm: AlgorithmSection) -> CorrectionResult:
    """Weight tokens by ``p/β`` within [correction_low, correction_high], by 0 outside."""
    raw = exp(log_ratio(facts, "token"))
    return keep(facts, raw, (raw >= algorithm.correction_low) & (raw <= algorithm.correction_high))
