"""Tapered off-policy REINFORCE. Le Roux et al. (arXiv 2503.14286)."""

from __future__ import annotations

import torch
from torch import Tensor

from learner.algorithm.losses.base import MAX_LOG_RATIO, LossTokens
from learner.algorithm.sequences import sequence_sum
from learner.algorithm.traits import LossTraits, declares
from learner.config import AlgorithmSection


@declares(LossTraits())
def topr(tokens: LossTokens, algorithm: AlgorithmSection) -> tuple[Tensor, dict[str, Tensor]]:
    """Return ``-A log p`` for A >= 0, ``-sg(clip(r, 0, 1)) A log p`` for A < 0.

    Good samples are imitated regardless of their policy; bad ones are pushed down only as far as
    the policy still makes them. r is the ratio of the whole sequence, as in the paper, or of the
    token (``importance_sampling_level``).

    Returns:
        Losses (T,), and the sum ``clipped``: tokens with A < 0 and r > 1.
    """
    log_ratio = (tokens.logprobs - tokens.old_logprobs).detach()
    if algorithm.importance_sampling_level == "sequence":
        log_ratio = sequence_sum(log_ratio, tokens.sequence, tokens.num_sequences)
    negative = tokens.advantages < 0
    taper = log_ratio.clamp(-MAX_LOG_RATIO, 0.0).exp()
    weight = torch.where(negative, taper, torch.ones_like(taper))
    return -weight * tokens.advantages * tokens.logprobs, {
        "clipped": (negative & (log_ratio > 0)).sum()
    }
