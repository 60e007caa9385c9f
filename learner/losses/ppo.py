"""The clipped surrogate. Schulman et al. (arXiv 1707.06347).

Clip-higher: Yu et al., DAPO (arXiv 2503.14476). Dual clip: Ye et al. (arXiv 1912.09729).
"""

from __future__ import annotations

import torch
from torch import Tensor

from learner.config import AlgorithmSection
from learner.losses.base import Tokens, ratio


def ppo(tokens: Tokens, algorithm: AlgorithmSection) -> tuple[Tensor, dict[str, Tensor]]:
    """``-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)``, for A < 0 at most ``-dual_clip * A`` where that is set.

    Returns:
        Losses (T,), and the sums ``clipped`` (tokens whose clipped branch was the worse one) and ``dual_clipped``.
    """
    r, advantages = ratio(tokens.logprobs, tokens.old_logprobs), tokens.advantages
    plain = -r * advantages
    bounded = -r.clamp(1 - algorithm.clip_low, 1 + algorithm.clip_high) * advantages
    losses = torch.maximum(plain, bounded)
    stats = {"clipped": (bounded > plain).sum()}
    if algorithm.dual_clip is not None:
        ceiling = -algorithm.dual_clip * advantages
        capped = (advantages < 0) & (losses > ceiling)
        losses = torch.where(capped, ceiling, losses)
        stats["dual_clipped"] = capped.sum()
    return losses, stats
