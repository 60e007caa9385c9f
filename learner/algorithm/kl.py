"""Estimates the divergence from a reference policy from the logprobs of sampled tokens.

Schulman, "Approximating KL divergence" (2020). With d = log p - log ref, for tokens sampled from p:
k1 = d is unbiased and may be negative; k2 = d^2 / 2 is biased, never negative, and has the gradient
of the true divergence; k3 = exp(-d) - 1 + d is unbiased and never negative. Used as a loss, k1's
expected gradient is zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from learner.algorithm.losses.base import MAX_LOG_RATIO


def kl_penalty(logprobs: Tensor, ref_logprobs: Tensor, estimator: str) -> Tensor:
    """Return KL(p || ref) of each token, in nats.

    Args:
        logprobs: (T,) under the trained policy, with gradient.
        ref_logprobs: (T,) under the reference.
        estimator: k1, k2 or k3; in k3 the exponent is clamped to ±20.

    Returns:
        (T,)
    """
    difference = logprobs - ref_logprobs
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return 0.5 * torch.square(difference)
    if estimator == "k3":
        return torch.exp((-difference).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)) - 1 + difference
    raise ValueError(f"no KL estimator {estimator!r}; k1, k2, k3")


@dataclass
class KlCoefficient:
    """Weight of the divergence, fixed or adaptive. Ziegler et al. (arXiv 1909.08593), 2.2."""

    value: float  # the current weight
    target: float | None = None  # in nats per token, None for a fixed weight
    horizon: float = 10000.0  # sequences over which the weight adapts

    def update(self, kl: float, num_sequences: int) -> None:
        """Multiply by ``1 + clip(kl / target - 1, -0.2, 0.2) * num_sequences / horizon``."""
        if self.target is not None:
            error = min(max(kl / self.target - 1.0, -0.2), 0.2)
            self.value *= 1.0 + error * num_sequences / self.horizon
