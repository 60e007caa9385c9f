"""Off-policy sequence masking: drops bad samples that are now unlikely.

DeepSeek-V3.2 (arXiv 2512.02556).
"""

from __future__ import annotations

import torch

from learner.algorithm.corrections.base import CorrectionInputs, CorrectionResult, mask_weights
from learner.algorithm.sequences import sequence_mean
from learner.config import AlgorithmSection


def opsm(facts: CorrectionInputs, algorithm: AlgorithmSection) -> CorrectionResult:
    """Weight tokens by 0 if A < 0 and the sequence's divergence exceeds ``opsm_delta``, else by 1.

    The divergence, the sequence's mean ``log β - log θ``, estimates KL(β || θ) per token.
    """
    divergence = sequence_mean(
        facts.rollout_logprobs - facts.logprobs, facts.sequence, facts.num_sequences
    )
    dropped = (facts.advantages < 0) & (divergence > algorithm.opsm_delta)
    return mask_weights(facts, torch.ones_like(divergence), ~dropped)
