"""Computes sums, means and maxima over each sequence of a flat row of tokens, at every token."""

from __future__ import annotations

import torch
from torch import Tensor


def sequence_sum(values: Tensor, sequence: Tensor, num_sequences: int) -> Tensor:
    """Return the sum over a token's sequence, at every token.

    Args:
        values: (T,).
        sequence: (T,) int64, index of each token's sequence; must hold all tokens of a sequence.
        num_sequences: number of sequences.

    Returns:
        (T,)
    """
    sums = torch.zeros(num_sequences, dtype=values.dtype, device=values.device).index_add(
        0, sequence, values
    )
    return sums[sequence]


def sequence_max(values: Tensor, sequence: Tensor, num_sequences: int) -> Tensor:
    """Return the largest value of a token's sequence, at every token; see ``sequence_sum``."""
    lowest = torch.full((num_sequences,), -torch.inf, dtype=values.dtype, device=values.device)
    return lowest.scatter_reduce(0, sequence, values, "amax")[sequence]


def sequence_mean(values: Tensor, sequence: Tensor, num_sequences: int) -> Tensor:
    """Return the mean over a token's sequence, at every token; see ``sequence_sum``."""
    return (
        sequence_sum(values, sequence, num_sequences)
        / torch.bincount(sequence, minlength=num_sequences)[sequence]
    )
