"""Defines preference losses, over P pairs of a chosen and a rejected answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True)
class PairLogprobs:
    """Logprobs of whole answers, sums over their tokens in nats, (P,) each."""

    chosen: Tensor  # under the trained policy, with gradient
    rejected: Tensor
    ref_chosen: Tensor  # under the frozen reference
    ref_rejected: Tensor
    chosen_tokens: Tensor  # trained tokens of the answer, at least 1
    rejected_tokens: Tensor


class PreferenceLoss(Protocol):
    """Maps ``(pairs, beta)`` to each pair's loss (P,), and the chosen answer's margin (P,)."""

    def __call__(self, pairs: PairLogprobs, beta: float) -> tuple[Tensor, Tensor]: ...
