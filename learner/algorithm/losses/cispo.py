"""Clipped importance weights: every token keeps its gradient. MiniMax-M1 (arXiv 2506.13585)."""

from __future__ import annotations

from torch import Tensor

from learner.algorithm.losses.base import LossTokens, clamped_ratio
from learner.algorithm.traits import LossTraits, declares
from learner.config import AlgorithmSection


@declares(LossTraits())
def cispo(tokens: LossTokens, algorithm: AlgorithmSection) -> tuple[Tensor, dict[str, Tensor]]:
    """Return ``-sg(clip(r, 1 - clip_low, 1 + clip_high)) A log p``.

    ``clip_low: 1`` means no lower bound.

    Returns:
        Losses (T,), and the sum ``clipped``: tokens whose weight was clipped.
    """
    r = clamped_ratio(tokens.logprobs, tokens.old_logprobs).detach()
    weight = r.clamp(1 - algorithm.clip_low, 1 + algorithm.clip_high)
    return -weight * tokens.advantages * tokens.logprobs, {"clipped": (weight != r).sum()}
