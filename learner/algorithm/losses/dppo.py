"""Divergence proximal policy optimization: masks by the divergence of policies, not by the ratio.

Qi et al., "Rethinking the trust region in LLM reinforcement learning" (arXiv 2602.04879), the
binary variants: a distribution is the sampled token against all others.
"""

from __future__ import annotations

import torch
from torch import Tensor

from learner.algorithm.divergences import binary_kl
from learner.algorithm.losses.base import LossTokens, clamped_ratio
from learner.algorithm.traits import LossTraits, declares
from learner.config import AlgorithmSection


@declares(LossTraits())
def dppo_tv(tokens: LossTokens, algorithm: AlgorithmSection) -> tuple[Tensor, dict[str, Tensor]]:
    """Return ``-M sg(min(r, ratio_cap)) A log p``, M by the total variation ``|p - old|``.

    M is 0 where it exceeds ``clip_high`` and A > 0 has made the token likelier, or ``clip_low`` and
    A < 0 has made it less likely; else 1.

    Returns:
        Losses (T,), and the sum ``clipped``: masked tokens.
    """
    logprobs = tokens.logprobs.detach()
    return _masked_gradient(tokens, algorithm, (logprobs.exp() - tokens.old_logprobs.exp()).abs())


@declares(LossTraits())
def dppo_kl(tokens: LossTokens, algorithm: AlgorithmSection) -> tuple[Tensor, dict[str, Tensor]]:
    """Return what ``dppo_tv`` does, M by the binary divergence ``KL(old || p)``, in nats."""
    divergence = binary_kl(tokens.old_logprobs, tokens.logprobs.detach())
    return _masked_gradient(tokens, algorithm, divergence)


def _masked_gradient(
    tokens: LossTokens, algorithm: AlgorithmSection, divergence: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    advantages = tokens.advantages
    log_ratio = (tokens.logprobs - tokens.old_logprobs).detach()
    too_high = (advantages > 0) & (log_ratio > 0) & (divergence > algorithm.clip_high)
    too_low = (advantages < 0) & (log_ratio < 0) & (divergence > algorithm.clip_low)
    masked = too_high | too_low
    r = clamped_ratio(tokens.logprobs, tokens.old_logprobs).detach()
    weight = torch.where(masked, 0.0, r.clamp_max(algorithm.ratio_cap))
    return -weight * advantages * tokens.logprobs, {"clipped": masked.sum()}
