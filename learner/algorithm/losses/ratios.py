"""Measures how far the trained policy has moved from the sampling one."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from learner.algorithm.corrections.base import CorrectionResult
from learner.algorithm.losses.base import MAX_LOG_RATIO


def ratio_sums(logprobs: Tensor, rollout_logprobs: Tensor) -> dict[str, Tensor]:
    """Return float64 sums over the tokens of a micro-batch, for ``ratio_metrics``.

    Args:
        logprobs: (T,) under the trained policy.
        rollout_logprobs: (T,) of the sampling policy.
    """
    log_ratio = (logprobs.detach() - rollout_logprobs).double()
    weight = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return {
        "log_ratio": log_ratio.sum(),
        "k3": (weight - 1 - log_ratio).sum(),
        "weight": weight.sum(),
        "weight_squared": torch.square(weight).sum(),
    }


def correction_sums(correction: CorrectionResult) -> dict[str, Tensor]:
    """Return float64 sums over the tokens of a micro-batch, for ``correction_metrics``."""
    weight = correction.weights.double()
    return {
        "corrected": weight.sum(),
        "corrected_squared": torch.square(weight).sum(),
        "corr_clipped": correction.clipped.sum(),
        "corr_masked": correction.masked.sum(),
    }


def correction_metrics(sums: Mapping[str, float], num_tokens: float) -> dict[str, float]:
    """Return a correction's mean weight, effective sample size, and clipped and masked shares."""
    if num_tokens == 0 or "corrected" not in sums:
        return {"rollout_corr/clipped_fraction": 0.0, "rollout_corr/masked_fraction": 0.0}
    squared = sums["corrected_squared"]
    sample_size = sums["corrected"] ** 2 / (num_tokens * squared) if squared else 0.0
    return {
        "rollout_corr/truncated_is_mean": sums["corrected"] / num_tokens,
        "rollout_corr/truncated_ess": sample_size,
        "rollout_corr/clipped_fraction": sums["corr_clipped"] / num_tokens,
        "rollout_corr/masked_fraction": sums["corr_masked"] / num_tokens,
    }


def ratio_metrics(sums: Mapping[str, float], num_tokens: float) -> dict[str, float]:
    """Return the raw token-level metrics of a step.

    ``kl`` and ``k3_kl`` estimate KL(sampler || trained) in nats per token, ``is_mean`` is the mean
    importance weight, ``ess`` the effective sample size ``(sum w)^2 / (n * sum w^2)``, 1 on-policy.
    """
    if num_tokens == 0 or "log_ratio" not in sums:
        return {
            "rollout_corr/kl": 0.0,
            "rollout_corr/k3_kl": 0.0,
            "rollout_corr/is_mean": 1.0,
            "rollout_corr/ess": 1.0,
        }
    return {
        "rollout_corr/kl": -sums["log_ratio"] / num_tokens,
        "rollout_corr/k3_kl": sums["k3"] / num_tokens,
        "rollout_corr/is_mean": sums["weight"] / num_tokens,
        "rollout_corr/ess": sums["weight"] ** 2 / (num_tokens * sums["weight_squared"]),
    }
