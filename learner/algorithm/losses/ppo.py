"""The clipped surrogate. Schulman et al. (arXiv 1707.06347).

Clip-higher: Yu et al., DAPO (arXiv 2503.14476). Dual clip: Ye et al. (arXiv 1912.09729).
"""

from __future__ import annotations

import torch
from torch import Tensor

from learner.algorithm.losses.base import LossTokens, clamped_ratio
from learner.algorithm.traits import LossTraits, declares
from learner.config import AlgorithmSection


@declares(LossTraits(dual_clip=True))
def ppo(tokens: LossTokens, algorithm: AlgorithmSection) -> tuple[Tensor, dict[str, Tensor]]:
    """Return ``-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)``.

    With ``dual_clip`` it is at most ``-dual_clip * A`` for A < 0.

    Returns:
        Losses (T,), and the sums ``clipped`` (tokens whose clipped branch is larger) and
        ``dual_clipped``.
    """
    r = clamped_ratio(tokens.logprobs, tokens.old_logprobs)
    advantages = tokens.advantages
    losses, stats = clipped_surrogate(r, advantages, algorithm.clip_low, algorithm.clip_high)
    if algorithm.dual_clip is not None:
        ceiling = -algorithm.dual_clip * advantages
        capped = (advantages < 0) & (losses > ceiling)
        losses = torch.where(capped, ceiling, losses)
        stats["dual_clipped"] = capped.sum()
    return losses, stats


def clipped_surrogate(
    r: Tensor, advantages: Tensor, low: float, high: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return ``-min(r A, clip(r, 1 - low, 1 + high) A)``, (T,), and the sum ``clipped``."""
    plain = -r * advantages
    bounded = -r.clamp(1 - low, 1 + high) * advantages
    return torch.maximum(plain, bounded), {"clipped": (bounded > plain).sum()}
