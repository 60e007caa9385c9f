"""How far the policy being trained has moved from the one that sampled: sums that add up over micro-batches, and what they mean."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from learner.algorithm.corrections.base import Correction
from learner.algorithm.losses.base import MAX_LOG_RATIO


def ratio_sums(logprobs: Tensor, rollout_logprobs: Tensor) -> dict[str, Tensor]:
    """Sums over the tokens of a micro-batch, float64, from which ``ratio_metrics`` makes the figures of a whole step.

    Args:
        logprobs: (T,) under the policy being trained.
        rollout_logprobs: (T,) of the policy that sampled.
    """
    log_ratio = (logprobs.detach() - rollout_logprobs).double()
    weight = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return {
        "log_ratio": log_ratio.sum(),
        "k3": (weight - 1 - log_ratio).sum(),
        "weight": weight.sum(),
        "weight_squared": torch.square(weight).sum(),
    }


def correction_sums(correction: Correction) -> dict[str, Tensor]:
    """Sums over the tokens of a micro-batch for the truncated figures of ``correction_metrics``, float64."""
    weight = correction.weights.double()
    return {
        "corrected": weight.sum(),
        "corrected_squared": torch.square(weight).sum(),
        "corr_clipped": correction.clipped.sum(),
        "corr_masked": correction.masked.sum(),
    }


def correction_metrics(sums: Mapping[str, float], num_tokens: float) -> dict[str, float]:
    """What a correction made of the raw ratios: mean and effective sample size of its weights, shares of tokens cut and masked."""
    if num_tokens == 0 or "corrected" not in sums:
        return {"rollout_corr/clipped_fraction": 0.0, "rollout_corr/masked_fraction": 0.0}
    squared = sums["corrected_squared"]
    return {
        "rollout_corr/truncated_is_mean": sums["corrected"] / num_tokens,
        "rollout_corr/truncated_ess": sums["corrected"] ** 2 / (num_tokens * squared) if squared else 0.0,
        "rollout_corr/clipped_fraction": sums["corr_clipped"] / num_tokens,
        "rollout_corr/masked_fraction": sums["corr_masked"] / num_tokens,
    }


def ratio_metrics(sums: Mapping[str, float], num_tokens: float) -> dict[str, float]:
    """The raw token-level figures of a step.

    ``kl`` and ``k3_kl`` estimate KL(sampler || trained) in nats per token, ``is_mean`` is the mean importance weight, ``ess`` the
    effective sample size ``(sum w)^2 / (n * sum w^2)``, 1 when nothing has moved.
    """
    if num_tokens == 0 or "log_ratio" not in sums:
        return {"rollout_corr/kl": 0.0, "rollout_corr/k3_kl": 0.0, "rollout_corr/is_mean": 1.0, "rollout_corr/ess": 1.0}
    return {
        "rollout_corr/kl": -sums["log_ratio"] / num_tokens,
        "rollout_corr/k3_kl": sums["k3"] / num_tokens,
        "rollout_corr/is_mean": sums["weight"] / num_tokens,
        "rollout_corr/ess": sums["weight"] ** 2 / (num_tokens * sums["weight_squared"]),
    }
