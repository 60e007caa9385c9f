"""Soft adaptive policy optimization: a smooth gate on the ratio instead of a clip.

Gao et al. (arXiv 2511.20347).
"""

from __future__ import annotations

import torch
from torch import Tensor

from learner.algorithm.losses.base import LossTokens, clamped_ratio
from learner.algorithm.traits import LossTraits, declares
from learner.config import AlgorithmSection


@declares(LossTraits())
def sapo(tokens: LossTokens, algorithm: AlgorithmSection) -> tuple[Tensor, dict[str, Tensor]]:
    """Return ``-f(r) A``, where ``f(r) = (4 / tau) sigmoid(tau (r - 1))``.

    tau is ``sapo_tau_pos`` where A > 0, else ``sapo_tau_neg``. The slope of f is 1 at r = 1, as
    without a gate, and falls off on both sides. The paper averages over tokens, then over
    sequences: ``loss_agg_mode: seq-mean-token-mean``.

    Returns:
        Losses (T,); nothing is clipped, so there are no statistics.
    """
    r = clamped_ratio(tokens.logprobs, tokens.old_logprobs)
    tau = torch.where(tokens.advantages > 0, algorithm.sapo_tau_pos, algorithm.sapo_tau_neg)
    tau = tau.to(r.dtype)
    gate = 4.0 / tau * torch.sigmoid(tau * (r - 1.0))
    return -gate * tokens.advantages, {}
