"""Defines corrections: weights of token losses that correct for the sampling policy. Pure.

The ratio is always p / β: p the proximal policy (the one at the start of the step), β the sampling
one, token by token.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from learner.algorithm.losses.base import MAX_LOG_RATIO
from learner.algorithm.sequences import sequence_mean, sequence_sum
from learner.config import AlgorithmSection


@dataclass(frozen=True)
class CorrectionInputs:
    """Inputs of a correction: T trained tokens of S sequences, in order, without gradient."""

    logprobs: Tensor  # (T,) under the current policy
    proximal_logprobs: Tensor  # (T,) at the start of the step
    rollout_logprobs: Tensor  # (T,) of the sampling policy
    advantages: Tensor  # (T,)
    sequence: Tensor  # (T,) int64, index of the sequence, ascending
    num_sequences: int


@dataclass(frozen=True)
class CorrectionResult:
    """Result of a correction for T tokens."""

    old_logprobs: Tensor  # (T,) reference of the loss's ratios
    # (T,) factors of the losses; 0 masks, but the token still counts in the denominator
    weights: Tensor
    clipped: Tensor  # (T,) bool, whether a bound changed the weight to another one above 0
    masked: Tensor  # (T,) bool, whether the weight is 0


class CorrectionFunction(Protocol):
    """Maps ``(facts, algorithm)`` to weights, which are 1 on-policy."""

    def __call__(
        self, facts: CorrectionInputs, algorithm: AlgorithmSection
    ) -> CorrectionResult: ...


def log_ratio(facts: CorrectionInputs, level: str) -> Tensor:
    """Return ``log p/β`` at every token, (T,).

    Args:
        level: ``token``; ``sequence``, the sum over the token's sequence (the ratio is a product);
            ``geometric``, its mean.

    Raises:
        ValueError: for any other level.
    """
    tokens = facts.proximal_logprobs - facts.rollout_logprobs
    if level == "token":
        return tokens
    if level not in ("sequence", "geometric"):
        raise ValueError(f"no ratio at level {level!r}; token, sequence, geometric")
    reduce = sequence_sum if level == "sequence" else sequence_mean
    return reduce(tokens, facts.sequence, facts.num_sequences)


def clamped_exp(log_values: Tensor) -> Tensor:
    """Return the exponential of logarithms clamped to ±20."""
    return log_values.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def mask_weights(facts: CorrectionInputs, weights: Tensor, mask: Tensor) -> CorrectionResult:
    """Return a correction with the weights where ``mask`` is true, 0 elsewhere."""
    return CorrectionResult(
        facts.proximal_logprobs, torch.where(mask, weights, 0.0), torch.zeros_like(mask), ~mask
    )


def bypass_proximal(
    correction: CorrectionResult, rollout_logprobs: Tensor, *, loss_has_ratio: bool
) -> CorrectionResult:
    """Return a correction of a loss whose ratios are θ/β, without a proximal policy.

    Li et al., "Rollout correction" in verl: with two policies the loss's own ratio is the
    importance weight, so only rejections remain; a loss without a ratio keeps the weights.

    Args:
        correction: computed with θ as p.
        rollout_logprobs: (T,) of β.
    """
    if not loss_has_ratio:
        return replace(correction, old_logprobs=rollout_logprobs)
    return CorrectionResult(
        rollout_logprobs,
        torch.where(correction.masked, 0.0, torch.ones_like(correction.weights)),
        torch.zeros_like(correction.clipped),
        correction.masked,
    )


def interpolate_logprobs(
    logprobs: Tensor, rollout_logprobs: Tensor, versions: Tensor, version: int
) -> Tensor:
    """Return proximal logprobs ``log β + α (log θ - log β)``.

    With ``α = (v_p - v_β) / (v_p + 1 - v_β)`` this interpolates from the sampling version to the
    one that this step makes. "AReaL" (arXiv 2505.24298) trains on the decoupled objective; its
    later releases interpolate instead of a second forward pass.

    Args:
        logprobs: (T,) of θ, without gradient.
        rollout_logprobs: (T,) of β.
        versions: (T,) int64, v_β of each token; a future one counts as current.
        version: v_p, the version at the start of the step.

    Returns:
        (T,)
    """
    lag = (version - versions).clamp_min(0).to(logprobs.dtype)
    return rollout_logprobs + lag / (lag + 1) * (logprobs - rollout_logprobs)
