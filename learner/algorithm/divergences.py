"""Divergences between two distributions of which only the sampled token's logprob is known."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

# Least probability of all other tokens; float32 cannot tell a smaller one from 0.
LEAST_REMAINDER: Final = 1e-7


def binary_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return ``p log(p / q) + (1 - p) log((1 - p) / (1 - q))``, (T,), in nats, at least 0.

    The divergence of "this token" against "any other", which never exceeds that of the whole
    distributions. Where a probability is 1, the other tokens are taken to have 1e-7.

    Args:
        log_p: (T,) logprobs of the sampled tokens.
        log_q: (T,) likewise, under the other policy.
    """
    p = log_p.clamp_max(0.0).exp()
    q = log_q.clamp_max(0.0).exp()
    rest_p = (1.0 - p).clamp_min(LEAST_REMAINDER)
    rest_q = (1.0 - q).clamp_min(LEAST_REMAINDER)
    divergence = p * (log_p - log_q) + rest_p * (torch.log(rest_p) - torch.log(rest_q))
    return divergence.clamp_min(0.0)
