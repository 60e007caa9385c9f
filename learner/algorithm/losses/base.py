"""Defines losses, which take the trained tokens of a micro-batch in one flat row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

import torch
from torch import Tensor

from learner.config import AlgorithmSection

# Log-ratios are clamped to this before exp, which overflows float32 at 89.
MAX_LOG_RATIO: Final = 20.0


@dataclass(frozen=True)
class LossTokens:
    """T trained tokens of S sequences, in order; float tensors are float32."""

    logprobs: Tensor  # (T,) under the trained policy, with gradient
    old_logprobs: Tensor  # (T,) reference of the ratios
    advantages: Tensor  # (T,)
    sequence: Tensor  # (T,) int64, index of the sequence, ascending
    num_sequences: int
    selected: Tensor | None = None  # (T,) bool, tokens that a loss which selects treats differently


class PolicyLoss(Protocol):
    """Maps ``(tokens, algorithm)`` to each token's loss (T,), and statistics as sums over tokens.

    If the advantage of a whole sequence is 0, its loss and gradient must be 0: the backward pass
    omits it.
    """

    def __call__(
        self, tokens: LossTokens, algorithm: AlgorithmSection
    ) -> tuple[Tensor, dict[str, Tensor]]: ...


def clamped_ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """Return ``exp(logprobs - old_logprobs)``, (T,), the log clamped to ±20."""
    return torch.exp((logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
