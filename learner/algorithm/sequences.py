"""Sums and means over each sequence of a flat row of tokens, given back at every token of it."""

from __future__ import annotations

import torch
from torch import Tensor


def sequence_sum(values: Tensor, sequence: Tensor, num_sequences: int) -> Tensor:
    """The sum over a token's sequence, at every token.

    Args:
        values: (T,).
        sequence: (T,) int64, which sequence a token belongs to; all of a sequence's tokens must be here.
        num_sequences: how many there are.

    Returns:
        (T,)
    """
    sums = torch.zeros(num_sequences, dtype=values.dtype, device=values.device).index_add(0, sequence, values)
    return sums[sequence]


def sequence_mean(values: Tensor, sequence: Tensor, num_sequences: int) -> Tensor:
    """The mean over a token's sequence, at every token; as ``sequence_sum``."""
    return sequence_sum(values, sequence, num_sequences) / torch.bincount(sequence, minlength=num_sequences)[sequence]
