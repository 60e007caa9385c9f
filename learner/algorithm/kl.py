"""Estimates the divergence from a reference policy from the logprobs of sampled tokens.

Schulman, "Approximating KL divergence" (2020). With d = log p - log ref, for tokens sampled from p:
k1 = d is unbiased and may be negative; k2 = d^2 / 2 is biased, never negative, and has the gradient
of the true divergence; k3 = exp(-d) - 1 + d is unbiased and never negative. Used as a loss, k1's
expected gradient is zero, and k3's is that of KL(ref || p). Two ways give both their values and the
true gradient: k1+ and k3+ take the gradient of k2 (verl's names); or the estimate is weighed by the
ratio to the sampling policy, through which gradient flows (DeepSeek-V3.2, arXiv 2512.02556,
equation 7), which is also unbiased off-policy.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from learner.algorithm.losses.base import MAX_LOG_RATIO, clamped_ratio


def kl_penalty(logprobs: Tensor, ref_logprobs: Tensor, estimator: str) -> Tensor:
    """Return KL(p || ref) of each token, in nats.

    Args:
        logprobs: (T,) under the trained policy, with gradient.
        ref_logprobs: (T,) under the reference.
        estimator: k1, k2 or k3; in k3 the exponent is clamped to ±20. k1+ and k3+ have the value of
            k1 and k3, and the gradient of k2.

    Returns:
        (T,)

    Raises:
        ValueError: for any other estimator.
    """
    difference = logprobs - ref_logprobs
    if estimator in ("k1+", "k3+"):
        gradient = 0.5 * torch.square(difference)
        value = kl_penalty(logprobs.detach(), ref_logprobs, estimator[:-1])
        return value + (gradient - gradient.detach())
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return 0.5 * torch.square(difference)
    if estimator == "k3":
        return torch.exp((-difference).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)) - 1 + difference
    raise ValueError(f"no KL estimator {estimator!r}; k1, k2, k3, k1+, k3+")


def weighted_penalty(
    logprobs: Tensor, ref_logprobs: Tensor, rollout_logprobs: Tensor, estimator: str
) -> Tensor:
    """Return ``r`` times ``kl_penalty``, (T,), with gradient through both.

    There ``r = p / β``, its log clamped to ±20. For tokens sampled from β its expectation is KL(p
    || ref), and with k1 and k3 that of its gradient is the divergence's gradient, however far β is
    from p. DeepSeek-V3.2 (arXiv 2512.02556), equation 7, with k3.

    Args:
        rollout_logprobs: (T,) under β, which sampled the tokens.
    """
    ratio = clamped_ratio(logprobs, rollout_logprobs)
    return ratio * kl_penalty(logprobs, ref_logprobs, estimator)


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
