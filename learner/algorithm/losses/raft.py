"""RAFT++: importance-weighted, clipped imitation of good samples only.

Xiong et al. (arXiv 2504.11343).
"""

from __future__ import annotations

from torch import Tensor

from learner.algorithm.losses.base import LossTokens, clamped_ratio
from learner.algorithm.losses.ppo import clipped_surrogate
from learner.algorithm.traits import LossTraits, declares
from learner.config import AlgorithmSection


@declares(LossTraits())
def raft_plus_plus(
    tokens: LossTokens, algorithm: AlgorithmSection
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return ``-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)`` if A > 0, else 0.

    With the estimator ``reinforce`` and rewards of 0 and 1 this is the paper's; all tokens count in
    the denominator.

    Returns:
        Losses (T,), and the sum ``clipped``.
    """
    r = clamped_ratio(tokens.logprobs, tokens.old_logprobs)
    return clipped_surrogate(
        r, tokens.advantages.clamp_min(0.0), algorithm.clip_low, algorithm.clip_high
    )
