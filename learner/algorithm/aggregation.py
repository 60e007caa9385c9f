"""Aggregates token losses to one number, exact over the global batch however it is cut.

Every ``loss_agg_mode`` is ``sum of weight * loss over tokens / denominator``: the weight of a token
is known from its own sequence, the denominator only after the whole batch. So micro-batches add up
their weighted sums, and the gradient is divided once, before it is clipped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

MODES: Final = (
    "token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
)


@dataclass
class BatchCounts:
    """Counts of a batch so far; counts of micro-batches and ranks add up."""

    tokens: int = 0  # trained tokens
    rows: int = 0  # sequences with at least one trained token

    def add(self, tokens: int, rows: int) -> None:
        """Add a micro-batch."""
        self.tokens += tokens
        self.rows += rows


def token_weights(mode: str, sequence: Tensor, num_sequences: int) -> Tensor:
    """Return the factor of each token's loss in the numerator.

    Args:
        mode: one of MODES.
        sequence: (T,) int64, index of each token's sequence; must hold all tokens of a sequence.
        num_sequences: number of sequences.

    Returns:
        (T,) float32: 1, and 1 / (trained tokens of the sequence) for seq-mean-token-mean.
    """
    if mode == "seq-mean-token-mean":
        return 1.0 / torch.bincount(sequence, minlength=num_sequences)[sequence]
    return torch.ones(len(sequence), device=sequence.device)


def loss_denominator(mode: str, counts: BatchCounts, max_length: int | None = None) -> float:
    """Return the divisor of the sum over the global batch; 1 for a batch without tokens.

    Args:
        mode: one of MODES.
        counts: of the global batch.
        max_length: the constant of seq-mean-token-sum-norm, in tokens.
    """
    if counts.tokens == 0:
        return 1.0
    if mode == "token-mean":
        return float(counts.tokens)
    if mode == "seq-mean-token-sum-norm":
        if max_length is None:
            raise ValueError("seq-mean-token-sum-norm needs a maximum length")
        return float(counts.rows * max_length)
    return float(counts.rows)
