"""Decoupled objective: trust region around p. Hilton et al., AReaL.

arXiv 2110.00641 and arXiv 2505.24298.
"""

from __future__ import annotations

import torch

from learner.algorithm.corrections.base import (
    CorrectionInputs,
    CorrectionResult,
    clamped_exp,
    log_ratio,
    mask_weights,
)
from learner.config import AlgorithmSection


def decoupled(facts: CorrectionInputs, algorithm: AlgorithmSection) -> CorrectionResult:
    """Weight the loss on θ/p by ``sg(p/β)``, truncated or masked above ``correction_high``."""
    raw = clamped_exp(log_ratio(facts, "token"))
    high = algorithm.correction_high
    above = raw > high
    if algorithm.correction_mode == "mask":
        return mask_weights(facts, raw, ~above)
    return CorrectionResult(
        facts.proximal_logprobs, raw.clamp_max(high), above, torch.zeros_like(above)
    )
