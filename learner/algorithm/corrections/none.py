"""No correction: the loss takes its ratios against the sampling policy."""

from __future__ import annotations

import torch

from learner.algorithm.corrections.base import CorrectionInputs, CorrectionResult
from learner.config import AlgorithmSection


def none(facts: CorrectionInputs, algorithm: AlgorithmSection) -> CorrectionResult:
    """Return weights of 1, and ratios against β."""
    nothing_masked = torch.zeros_like(facts.sequence, dtype=torch.bool)
    return CorrectionResult(
        facts.rollout_logprobs,
        torch.ones_like(facts.rollout_logprobs),
        nothing_masked,
        nothing_masked,
    )
