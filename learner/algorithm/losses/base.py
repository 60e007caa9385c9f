"""Defines losses, which take the trained tokens of a micro-batch in one flat row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar

import torch
from torch import Tensor

from learner.config import AlgorithmSection

F = TypeVar("F", bound=Callable[..., Any])
MAX_LOG_RATIO: Final = 20.0  # log-ratios are clamped to this before exp


@dataclass(frozen=True)
class LossTokens:
    """T trained tokens of S sequences, in order; float tensors are float32."""

    logprobs: Tensor  # (T,) under the trained policy, with gradient
    old_logprobs: Tensor  # (T,) reference of the ratios
    advantages: Tensor  # (T,)
    sequence: Tensor  # (T,) int64, index of the sequence, ascending
    num_sequences: int


class PolicyLoss(Protocol):
    """Maps ``(tokens, algorithm)`` to the loss of each token (T,), to minimize, and statistics as sums over the tokens.

    If the advantage of a whole sequence is 0, its loss and gradient must be 0: the backward pass omits it.
    """

    def __call__(self, tokens: LossTokens, algorithm: AlgorithmSection) -> tuple[Tensor, dict[str, Tensor]]: ...


@dataclass(frozen=True)
class LossTraits:
    """Which settings take effect with a loss; others are refused.

    Attributes:
        dual_clip: ``algorithm.dual_clip`` bounds it.
        kl: a KL term may be added to it (``algorithm.kl_coef``).
    """

    dual_clip: bool = False
    kl: bool = True


def declares(traits: LossTraits) -> Callable[[F], F]:
    """Attach the traits to a loss; the settings of one without them are not checked."""

    def attach(loss: F) -> F:
        loss.traits = traits  # type: ignore[attr-defined]
        return loss

    return attach


def ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """Return ``exp(logprobs - old_logprobs)``, (T,), the log clamped to ±20."""
    return torch.exp((logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
