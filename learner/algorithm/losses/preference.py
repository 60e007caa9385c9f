"""What every preference loss takes and gives: one number a sequence, for P pairs of a chosen and a rejected answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True)
class Pairs:
    """Logprobs of whole answers, sums over their tokens in nats, (P,) each."""

    chosen: Tensor  # under the policy being trained, with gradient
    rejected: Tensor  # the same
    ref_chosen: Tensor  # under the frozen reference
    ref_rejected: Tensor  # the same
    chosen_tokens: Tensor  # trained tokens of the answer, at least 1
    rejected_tokens: Tensor  # the same


class PreferenceLoss(Protocol):
    """``(pairs, beta)`` to the loss of each pair (P,), to be minimised, and the reward margin (P,) by which the chosen answer leads."""

    def __call__(self, pairs: Pairs, beta: float) -> tuple[Tensor, Tensor]: ...
