"""Turns samples into tensors: rows for the forward pass, flat trained tokens for the loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from learner.algorithm.samples import Array, TrainSample
from learner.backends.models.packed_rows import PackedRow, SharedRow, pack_row


@dataclass(frozen=True)
class ObservedTokens:
    """U tokens that were said to the policy between its trained ones, in order of the sequences."""

    predictors: Tensor  # (U,) int64, as ``TokenBatch.predictors``
    targets: Tensor  # (U,) int64, the tokens
    sequence: Tensor  # (U,) int64, which sequence a token belongs to


@dataclass(frozen=True)
class TokenBatch:
    """S sequences, T trained tokens among them, in the order of the sequences.

    Padded: S rows of L input tokens; a causal model's trained positions do not see the padding
    after them. Packed: one row of all sequences, with a prefix that several of them begin with only
    once.
    """

    input_ids: Tensor  # (S, L) int64, or packed (1, L)
    # (T,) int64, index into the flattened rows of the position that predicts each token
    predictors: Tensor
    targets: Tensor  # (T,) int64, the tokens
    sequence: Tensor  # (T,) int64, which sequence a token belongs to
    rollout_logprobs: Tensor  # (T,) float32
    advantages: Tensor  # (T,) float32
    temperature: Tensor | None  # (T,) float32, None when 1 everywhere
    num_rows: int  # S
    versions: Tensor  # (T,) int64, policy version that sampled each token
    proximal_logprobs: Tensor | None = None  # (T,) float32, None where some sample has none
    values: Tensor | None = None  # (T,) float32, likewise
    returns: Tensor | None = None  # (T,) float32, likewise
    # (T,) float32, NaN where no teacher has scored a token; None: none has scored any
    teacher_logprobs: Tensor | None = None
    teacher_top_ids: Tensor | None = None  # (T, k) int64, the teacher's likeliest tokens
    teacher_top_logprobs: Tensor | None = None  # (T, k) float32, NaN where there are none
    # (1, L) int64, packed: each token's place in its own sequence
    position_ids: Tensor | None = None
    packing: PackedRow | None = None  # packed: where the sequences are
    # (T,) bool, tokens that the loss treats differently; None where some sample has none
    selected: Tensor | None = None
    observed: ObservedTokens | None = None  # None: not asked for

    def with_observed(self) -> TokenBatch:
        """Return the batch with its observed tokens, at temperature 1, behind the trained ones."""
        observed = self.observed
        if observed is None:
            return self
        temperature = self.temperature
        if temperature is not None:
            temperature = torch.cat([temperature, temperature.new_ones(len(observed.targets))])
        return replace(
            self,
            predictors=torch.cat([self.predictors, observed.predictors]),
            targets=torch.cat([self.targets, observed.targets]),
            temperature=temperature,
        )

    def inputs(self) -> dict[str, Any]:
        """Return the arguments of a transformers model."""
        if self.packing is None:
            return {"input_ids": self.input_ids}
        # With a mask of ones transformers does not search the position ids for sequences, which the
        # packing has already.
        arguments = {
            "input_ids": self.input_ids,
            "position_ids": self.position_ids,
            "packing": self.packing,
        }
        return arguments | {"attention_mask": torch.ones_like(self.input_ids)}


def collate_samples(
    samples: Sequence[TrainSample],
    device: torch.device,
    *,
    packed: bool = False,
    with_observed: bool = False,
) -> TokenBatch:
    """Build the tensors of a slice; every sample has at least one trained token.

    A sequence ends before its last trained token, which is only predicted; later tokens are not
    needed.

    Args:
        packed: all sequences in one row, for models that ``choose_attention`` accepted for it.
        with_observed: also of what was said to the policy between its trained tokens.
    """
    lengths = [sample.num_inputs for sample in samples]
    tokens = [sample.token_ids[:n] for sample, n in zip(samples, lengths, strict=True)]
    row = SharedRow.of(tokens) if packed else None
    if row is not None:
        ids = row.token_ids[None]
        indices = row.indices
    else:
        ids = np.zeros((len(samples), max(lengths)), np.int64)
        for padded, sequence in zip(ids, tokens, strict=True):
            padded[: len(sequence)] = sequence
        indices = [number * max(lengths) + np.arange(n) for number, n in enumerate(lengths)]
    temperatures = np.concatenate(
        [np.full(s.num_tokens, s.temperature, np.float32) for s in samples]
    )

    def put(values: Array) -> Tensor:
        return torch.from_numpy(values).to(device, non_blocking=True)

    def observed_tokens() -> ObservedTokens:
        positions = [s.observed_positions for s in samples]
        pairs = list(zip(samples, positions, strict=True))
        places = [where[at - 1] for where, at in zip(indices, positions, strict=True)]
        return ObservedTokens(
            predictors=put(np.concatenate(places)),
            targets=put(np.concatenate([s.token_ids[at] for s, at in pairs]).astype(np.int64)),
            sequence=put(np.repeat(np.arange(len(samples)), [len(at) for at in positions])),
        )

    def optional(name: str) -> Tensor | None:
        columns = [getattr(s, name) for s in samples]
        if any(column is None for column in columns):
            return None
        return put(
            np.concatenate(
                [column[s.positions] for column, s in zip(columns, samples, strict=True)]
            )
        )

    taught = {name: put(column) for name, column in _teacher_columns(samples).items()}
    selected = optional("selected")
    return TokenBatch(
        input_ids=put(ids),
        predictors=put(
            np.concatenate(
                [places[s.positions - 1] for places, s in zip(indices, samples, strict=True)]
            )
        ),
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
        teacher_logprobs=taught.get("teacher_logprobs"),
        teacher_top_ids=taught.get("teacher_top_ids"),
        teacher_top_logprobs=taught.get("teacher_top_logprobs"),
        position_ids=None if row is None else put(row.places[None]),
        packing=None if row is None else pack_row(indices, device),
        selected=None if selected is None else selected.bool(),
        observed=observed_tokens() if with_observed else None,
    )


def _teacher_columns(samples: Sequence[TrainSample]) -> dict[str, Array]:
    """Return the columns of teachers over the trained tokens; empty if no sample has any."""
    if all(sample.teacher_logprobs is None for sample in samples):
        return {}
    columns = {
        "teacher_logprobs": np.concatenate(
            [
                np.full(s.num_tokens, np.nan, np.float32)
                if s.teacher_logprobs is None
                else s.teacher_logprobs[s.positions]
                for s in samples
            ]
        )
    }
    numbers = {
        len(s.teacher_top_ids) // s.num_tokens
        for s in samples
        if s.teacher_top_ids is not None and s.num_tokens
    }
    if not numbers:
        return columns
    # Records from before a change of top_k have another number; each begins with a smaller one.
    k = min(numbers)
    ids = [_as_rows(s.teacher_top_ids, np.arange(k), s.num_tokens) for s in samples]
    no_logprobs = np.full(k, np.nan, np.float32)
    logprobs = [_as_rows(s.teacher_top_logprobs, no_logprobs, s.num_tokens) for s in samples]
    return columns | {
        "teacher_top_ids": np.concatenate(ids).astype(np.int64),
        "teacher_top_logprobs": np.concatenate(logprobs),
    }


def _as_rows(values: Array | None, filler: Array, num_rows: int) -> Array:
    """Return flat values as rows as long as ``filler``, or rows of it."""
    rows: Array = np.tile(filler, num_rows) if values is None else values
    if not num_rows:
        return rows.reshape(0, len(filler))
    return rows.reshape(num_rows, -1)[:, : len(filler)]
