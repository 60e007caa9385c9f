"""The plain policy gradient. Williams, Machine Learning 8 (1992)."""

from __future__ import annotations

from torch import Tensor

from learner.algorithm.losses.base import LossTokens
from learner.algorithm.traits import LossTraits, declares
from learner.config import AlgorithmSection


@declares(LossTraits(ratio=False))
def reinforce(tokens: LossTokens, algorithm: AlgorithmSection) -> tuple[Tensor, dict[str, Tensor]]:
    """Return ``-A log p``, (T,); without importance weights there are no statistics."""
    return -tokens.advantages * tokens.logprobs, {}
