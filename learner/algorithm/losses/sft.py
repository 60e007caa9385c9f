"""Maximum likelihood on given tokens."""

from __future__ import annotations

from torch import Tensor

from learner.algorithm.losses.base import LossTokens
from learner.algorithm.traits import LossTraits, declares
from learner.config import AlgorithmSection


@declares(LossTraits(ratio=False))
def sft(tokens: LossTokens, algorithm: AlgorithmSection) -> tuple[Tensor, dict[str, Tensor]]:
    """Return ``-w log p``, (T,); the weight w, 1 in demonstrations, replaces the advantage."""
    return -tokens.advantages * tokens.logprobs, {}
