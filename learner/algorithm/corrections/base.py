"""What a correction is: a weight for each token's loss that makes up for who sampled it. Pure; nothing here carries gradient.

The ratio is p / β everywhere: p the proximal policy (the one at the start of the step), β the one that sampled, token by token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from learner.algorithm.losses.base import MAX_LOG_RATIO
from learner.algorithm.sequences import sequence_mean, sequence_sum
from learner.config import AlgorithmSection


@dataclass(frozen=True)
class Facts:
    """T trained tokens of S sequences, in order, without gradient."""

    logprobs: Tensor  # (T,) under the policy being trained, as it is now
    proximal_logprobs: Tensor  # (T,) at the start of the step
    rollout_logprobs: Tensor  # (T,) of the policy that sampled
    advantages: Tensor  # (T,)
    sequence: Tensor  # (T,) int64, index of the sequence, ascending
    num_sequences: int


@dataclass(frozen=True)
class Correction:
    """What a correction says about T tokens."""

    old_logprobs: Tensor  # (T,) what the loss takes its ratios against
    weights: Tensor  # (T,) factors of the losses; 0 masks, the token still counts in the denominator
    clipped: Tensor  # (T,) bool, where a bound changed the weight to another one above 0
    masked: Tensor  # (T,) bool, where the token counts nothing


class Corrector(Protocol):
    """``(facts, algorithm)`` to weights; where nothing has moved the weights are 1."""

    def __call__(self, facts: Facts, algorithm: AlgorithmSection) -> Correction: ...


def log_ratio(facts: Facts, level: str) -> Tensor:
    """``log p/β`` at every token, (T,).

    Args:
        level: ``token``; ``sequence``, the sum over the token's sequence (the ratio is a product); ``geometric``, its mean.
    """
    tokens = facts.proximal_logprobs - facts.rollout_logprobs
    if level == "token":
        return tokens
    reduce = sequence_sum if level == "sequence" else sequence_mean
    return reduce(tokens, facts.sequence, facts.num_sequences)


def exp(log_values: Tensor) -> Tensor:
    """The exponential, the logarithm clamped to ±20."""
    return log_values.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def keep(facts: Facts, weights: Tensor, kept: Tensor) -> Correction:
    """Weights where ``kept`` is true, 0 elsewhere."""
    return Correction(facts.proximal_logprobs, torch.where(kept, weights, 0.0), torch.zeros_like(kept), ~kept)


def interpolate(logprobs: Tensor, rollout_logprobs: Tensor, versions: Tensor, version: int) -> Tensor:
    """Proximal logprobs without another forward pass: ``log β + α (log θ - log β)``, ``α = (v_p - v_β) / (v_p + 1 - v_β)``.

    On a line from the version that sampled to the one that this step makes. "AReaL" (arXiv 2505.24298) trains on the decoupled
    objective; the line is what its later releases put in place of a second forward pass.

    Args:
        logprobs: (T,) of θ, without gradient.
        rollout_logprobs: (T,) of β.
        versions: (T,) int64, v_β of each token; one from the future counts as current.
        version: v_p, the version at the start of the step.

    Returns:
        (T,)
    """
    behind = (version - versions).clamp_min(0).to(logprobs.dtype)
    return rollout_logprobs + behind / (behind + 1) * (logprobs - rollout_logprobs)
