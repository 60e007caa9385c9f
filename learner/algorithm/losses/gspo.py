"""Group sequence policy optimization: clips the ratio of whole sequences.

Zheng et al. (arXiv 2507.18071).
"""

from __future__ import annotations

import torch
from torch import Tensor

from learner.algorithm.losses.base import LossTokens, clamped_ratio
from learner.algorithm.losses.ppo import clipped_surrogate
from learner.algorithm.sequences import sequence_mean
from learner.algorithm.traits import LossTraits, declares
from learner.config import AlgorithmSection


@declares(LossTraits())
def gspo(tokens: LossTokens, algorithm: AlgorithmSection) -> tuple[Tensor, dict[str, Tensor]]:
    """Return ``-min(s_t A, clip(s_t, 1 - clip_low, 1 + clip_high) A)``.

    There ``s_t = sg(s) p_t / sg(p_t)``, and s is the exponential of the mean over the sequence of
    ``log p - log old``. The stop-gradient form, the paper's GSPO-token, has the same value and
    gradient as s if the advantage is constant per sequence, and also works if it is not. The paper
    averages over tokens, then over sequences: ``loss_agg_mode: seq-mean-token-mean``.

    Returns:
        Losses (T,), and the sum ``clipped``, in tokens.
    """
    log_ratio = sequence_mean(
        (tokens.logprobs - tokens.old_logprobs).detach(), tokens.sequence, tokens.num_sequences
    )
    s = clamped_ratio(
        log_ratio + tokens.logprobs - tokens.logprobs.detach(), torch.zeros_like(log_ratio)
    )
    return clipped_surrogate(s, tokens.advantages, algorithm.clip_low, algorithm.clip_high)
