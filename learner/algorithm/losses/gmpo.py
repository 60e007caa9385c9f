"""Geometric-mean policy optimization: token clips, then the geometric mean of the sequence.

Zhao et al. (arXiv 2507.20673).
"""

from __future__ import annotations

import torch
from torch import Tensor

from learner.algorithm.losses.base import LossTokens, clamped_ratio
from learner.algorithm.sequences import sequence_mean
from learner.algorithm.traits import LossTraits, declares
from learner.config import AlgorithmSection


@declares(LossTraits())
def gmpo(tokens: LossTokens, algorithm: AlgorithmSection) -> tuple[Tensor, dict[str, Tensor]]:
    """Return ``-s_t A``, where s is ``exp(mean over the sequence of c_t)``.

    ``c_t`` is ``min(l_t, clip(l_t, -clip_low, clip_high))`` for A >= 0 and the maximum for A < 0,
    with ``l_t = log p_t - log old_t``. The token form, ``s_t = sg(s) exp(c_t - sg(c_t))``, has the
    paper's value and gradient if the advantage is constant per sequence and ``loss_agg_mode`` is
    seq-mean-token-mean, and also works if it is not.

    Returns:
        Losses (T,), and the sum ``clipped``: tokens whose log-ratio was clipped.
    """
    log_ratio = tokens.logprobs - tokens.old_logprobs
    bounded = log_ratio.clamp(-algorithm.clip_low, algorithm.clip_high)
    clipped = torch.where(
        tokens.advantages < 0,
        torch.maximum(log_ratio, bounded),
        torch.minimum(log_ratio, bounded),
    )
    mean = sequence_mean(clipped.detach(), tokens.sequence, tokens.num_sequences)
    s = clamped_ratio(mean + clipped - clipped.detach(), torch.zeros_like(mean))
    return -s * tokens.advantages, {"clipped": (clipped != log_ratio).sum()}
