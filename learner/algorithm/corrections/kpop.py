"""KPop: masks tokens by the divergence of trainer and generator, in both directions.

Guo, Sun et al., "Taming training-inference mismatch in reinforcement learning with adaptive masking
regions" (2026); Ling team (arXiv 2606.15079), section 3.2.
"""

from __future__ import annotations

import torch

from learner.algorithm.corrections.base import CorrectionInputs, CorrectionResult, mask_weights
from learner.algorithm.divergences import binary_kl
from learner.config import AlgorithmSection


def kpop(facts: CorrectionInputs, algorithm: AlgorithmSection) -> CorrectionResult:
    """Weight tokens by 1 where both binary divergences are at most ``kpop_phi``, else by 0.

    These are ``KL(p || β)`` and ``KL(β || p)`` of the sampled token against all others. Unlike
    IcePop's fixed bounds on the ratio they leave unlikely tokens more room than likely ones, and
    what is kept is not weighed.
    """
    proximal = facts.proximal_logprobs
    rollout = facts.rollout_logprobs
    phi = algorithm.kpop_phi
    accepted = (binary_kl(proximal, rollout) <= phi) & (binary_kl(rollout, proximal) <= phi)
    return mask_weights(facts, torch.ones_like(proximal), accepted)
