"""Clip-Cov and KL-Cov: keep the tokens that would take away the most entropy.

Cui et al., "The entropy mechanism of reinforcement learning" (arXiv 2505.22617). The entropy falls
by the covariance of a token's logprob and advantage; the tokens that have the most of it are
selected over the whole step (``learner.algorithm.token_selection``).
"""

from __future__ import annotations

import torch
from torch import Tensor

from learner.algorithm.losses.base import LossTokens, clamped_ratio
from learner.algorithm.losses.ppo import clipped_surrogate
from learner.algorithm.traits import LossTraits, declares
from learner.config import AlgorithmSection


@declares(LossTraits(selects_tokens=True))
def clip_cov(tokens: LossTokens, algorithm: AlgorithmSection) -> tuple[Tensor, dict[str, Tensor]]:
    """Return PPO's loss, but 0 for selected tokens, which so have no gradient.

    Returns:
        Losses (T,), and the sum ``clipped``: tokens that are selected or clipped.
    """
    r = clamped_ratio(tokens.logprobs, tokens.old_logprobs)
    losses, stats = clipped_surrogate(r, tokens.advantages, algorithm.clip_low, algorithm.clip_high)
    if tokens.selected is None:
        return losses, stats
    kept = torch.where(tokens.selected, 0.0, losses)
    return kept, {"clipped": stats["clipped"] + tokens.selected.sum()}


@declares(LossTraits(selects_tokens=True))
def kl_cov(tokens: LossTokens, algorithm: AlgorithmSection) -> tuple[Tensor, dict[str, Tensor]]:
    """Return ``-r A``, plus ``kl_cov_coef |log r|`` for selected tokens.

    Returns:
        Losses (T,), and the sum ``clipped``: selected tokens.
    """
    r = clamped_ratio(tokens.logprobs, tokens.old_logprobs)
    losses = -r * tokens.advantages
    if tokens.selected is None:
        return losses, {}
    distance = (tokens.logprobs - tokens.old_logprobs).abs()
    penalty = torch.where(tokens.selected, algorithm.kl_cov_coef * distance, 0.0)
    return losses + penalty, {"clipped": tokens.selected.sum()}
