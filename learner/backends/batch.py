"""Samples to tensors: rows padded on the right for the forward pass, one flat row of trained tokens for the loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from learner.samples import Array, TrainSample


@dataclass(frozen=True)
class Batch:
    """S rows of at most L input tokens, T trained tokens among them, in row order."""

    input_ids: Tensor  # (S, L) int64; a causal model's trained positions see nothing of the padding behind them
    predictors: Tensor  # (T,) int64, index into the flattened (S * L) of the position that predicts each token
    targets: Tensor  # (T,) int64, the tokens
    sequence: Tensor  # (T,) int64, row of each token
    rollout_logprobs: Tensor  # (T,) float32
    advantages: Tensor  # (T,) float32
    temperature: Tensor | None  # (T,) float32, None when 1 everywhere
    num_rows: int
    versions: Tensor  # (T,) int64, policy version that sampled each token
    proximal_logprobs: Tensor | None = None  # (T,) float32, None where some sample has none
    values: Tensor | None = None  # (T,) float32, likewise
    returns: Tensor | None = None  # (T,) float32, likewise


def collate(samples: Sequence[TrainSample], device: torch.device) -> Batch:
    """Build the tensors of a slice; every sample has at least one trained token.

    A row ends before its last trained token, which is only predicted: what follows it would be computed for nothing.
    """
    longest = max(sample.num_inputs for sample in samples)
    ids = np.zeros((len(samples), longest), np.int64)
    for row, sample in enumerate(samples):
        ids[row, : sample.num_inputs] = sample.token_ids[: sample.num_inputs]
    temperatures = np.concatenate([np.full(s.num_tokens, s.temperature, np.float32) for s in samples])

    def put(values: Array) -> Tensor:
        return torch.from_numpy(values).to(device, non_blocking=True)

    def optional(name: str) -> Tensor | None:
        columns = [getattr(s, name) for s in samples]
        if any(column is None for column in columns):
            return None
        return put(np.concatenate([column[s.positions] for column, s in zip(columns, samples, strict=True)]))

    return Batch(
        input_ids=put(ids),
        predictors=put(np.concatenate([row * longest + s.positions - 1 for row, s in enumerate(samples)])),
        targets=put(np.concatenate([s.token_ids[s.positions] for s in samples]).astype(np.int64)),
        sequence=put(np.repeat(np.arange(len(samples)), [s.num_tokens for s in samples])),
        rollout_logprobs=put(np.concatenate([s.rollout_logprobs[s.positions] for s in samples])),
        advantages=put(np.concatenate([s.advantages[s.positions] for s in samples])),
        temperature=None if (temperatures == 1).all() else put(temperatures),
        num_rows=len(samples),
        versions=put(np.concatenate([s.versions[s.positions] for s in samples]).astype(np.int64)),
        proximal_logprobs=optional("proximal_logprobs"),
        values=optional("values"),
        returns=optional("returns"),
    )
