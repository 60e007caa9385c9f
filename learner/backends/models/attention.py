"""Attention for packed rows of a transformers model: each sequence of a row attends only to itself.

transformers separates packed sequences by position ids and masks them with a dense (row, row) matrix, so attention
costs the square of the row. Here the row is split for attention only: sequences of similar length become the rows of a
small batch for the causal kernel, which needs no mask; all other layers see the row without padding. A prefix that
several sequences begin with, as a group with its prompt, is in the row once: only attention computes it for each.

A model is packed only if a trial run is exact (``enable_packing``): windows, soft caps, sinks and recurrent layers are
not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from learner.algorithm.packing import Array, prefix_order

NAME: Final = "rlearner_packed"
MAX_LENGTH_RATIO: Final = 1.25  # longest to shortest sequence of one call; attention of the padding is wasted
_PROBE_PREFIX: Final = 2  # tokens that all sequences of the trial run begin with
_PROBE_LENGTHS: Final = (3, 1, 7, 6, 12)  # of the rest
_TOLERANCE: Final = {torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.02}  # relative; a leak is about 1


class InexactAttentionError(Exception):
    """The model's attention is not plain causal attention."""


class PackedRow:
    """Where the sequences of a row are; not a tuple, which torch.compile would inspect and compile for each layout.

    Attributes:
        shapes: for each call of the attention kernel, its number of sequences and the length of the longest.
        spread: (places,) int64, the row's token at each place of those calls; None: one to one.
        gather: (row,) int64, a place of each token.
    """

    def __init__(self, shapes: Sequence[tuple[int, int]], spread: Tensor | None, gather: Tensor | None) -> None:
        self.shapes, self.spread, self.gather = tuple(shapes), spread, gather

    def rows(self, states: Tensor) -> list[Tensor]:
        """(1, heads, row, width) to (sequences, heads, longest, width) for each call."""
        tokens = states[0] if self.spread is None else states[0].index_select(1, self.spread)
        parts = torch.split(tokens, [num * longest for num, longest in self.shapes], 1)
        shaped = zip(parts, self.shapes, strict=True)
        return [part.view(len(part), num, longest, -1).transpose(0, 1) for part, (num, longest) in shaped]

    def flat(self, rows: Sequence[Tensor]) -> Tensor:
        """The inverse, to (row, heads, width)."""
        parts = [part.transpose(1, 2).flatten(0, 1) for part in rows]
        tokens = parts[0] if len(parts) == 1 else torch.cat(parts)
        return tokens if self.gather is None else tokens.index_select(0, self.gather)


def pack_row(sequences: Sequence[Array], device: torch.device) -> PackedRow:
    """Group sequences of similar length.

    Args:
        sequences: the indices in the row of each one's tokens, (length,) int64; sequences may share tokens.
    """
    ordered = sorted(sequences, key=len)
    shapes: list[tuple[int, int]] = []
    spread: list[Array] = []
    while ordered:
        num = sum(len(one) <= MAX_LENGTH_RATIO * len(ordered[0]) for one in ordered)
        piece, ordered = ordered[:num], ordered[num:]
        longest = len(piece[-1])
        shapes.append((num, longest))
        # Places after a sequence's end repeat its last token; no token sees them, and their results are dropped.
        spread += [np.pad(one, (0, longest - len(one)), mode="edge") for one in piece]
    places = np.concatenate(spread)
    _, gather = np.unique(places, return_index=True)  # a token's first place, which no padding precedes
    if len(gather) == len(places) and bool((places[1:] > places[:-1]).all()):
        return PackedRow(shapes, None, None)
    return PackedRow(shapes, *(torch.from_numpy(indices).to(device) for indices in (places, gather)))


@dataclass(frozen=True)
class SharedRow:
    """Sequences in one row, with a prefix that several begin with only once.

    Attributes:
        token_ids: (row,) int64.
        places: (row,) int64, each token's place in every sequence that it is in.
        indices: of each sequence, the indices in the row of its tokens, (length,) int64.
    """

    token_ids: Array
    places: Array
    indices: list[Array]

    @staticmethod
    def of(sequences: Sequence[Array]) -> SharedRow:
        """Lay sequences in a row; a causal model computes the same for a token whatever follows it.

        Args:
            sequences: token ids, (length,) each, all lengths above 0.
        """
        indices: list[Array] = [np.empty(0, np.int64)] * len(sequences)
        ids: list[Array] = []
        places: list[Array] = []
        before, size = np.empty(0, np.int64), 0
        for number, shared in prefix_order(sequences):
            own = sequences[number][shared:]
            before = np.concatenate([before[:shared], np.arange(size, size + len(own))])
            indices[number], size = before, size + len(own)
            ids.append(own)
            places.append(np.arange(shared, len(before)))
        return SharedRow(np.concatenate(ids).astype(np.int64), np.concatenate(places), indices)


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    packing: PackedRow | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute attention for transformers; without ``packing``, by its own function.

    Args:
        query: (rows, heads, tokens, width), as are key and value, with fewer heads where heads share them.
        packing: of the only row.

    Returns:
        (rows, tokens, heads, width), and no attention weights.

    Raises:
        InexactAttentionError: if the model needs more than plain causal attention.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    odd = [name for name in ("sliding_window", "softcap", "s_aux", "position_bias") if others.get(name) is not None]
    if odd or dropout or attention_mask is not None:
        raise InexactAttentionError(f"its attention has {' and '.join(odd) or 'dropout or a mask'}")
    if packing is None:
        found: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, None, scaling=scaling, **others)
        return found
    return attend_separately(packing, query, key, value, scaling), None


@torch.compiler.disable  # type: ignore[untyped-decorator]
def attend_separately(packing: PackedRow, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
    """Return causal attention of the sequences of one row, (1, heads, row, width) each to (1, row, heads, width)."""
    shared = query.shape[1] != key.shape[1]
    attend = partial(functional.scaled_dot_product_attention, scale=scaling, is_causal=True, enable_gqa=shared)
    parts = zip(packing.rows(query), packing.rows(key), packing.rows(value), strict=True)
    return packing.flat([attend(*part) for part in parts])[None]


def _no_mask(*_: Any, mask_function: Any = None, **others: Any) -> None:
    """Return no mask to transformers, since the kernel is causal.

    Raises:
        InexactAttentionError: if an unpacked row needs a mask.
    """
    from transformers.masking_utils import causal_mask_function

    if others.get("allow_is_causal_skip", True) and mask_function is not causal_mask_function:
        raise InexactAttentionError("its attention is not plainly causal")


@torch.no_grad()
def enable_packing(model: Any, device: torch.device) -> str:
    """Let a causal language model take packed rows, or leave it unchanged.

    A trial run decides: sequences in one row must give the same results as each of them alone.

    Returns:
        Why it cannot take them; empty if it can.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    before = model.config._attn_implementation
    if before != "sdpa":
        return f"its attention is {before}"
    AttentionInterface.register(NAME, packed_attention)
    AttentionMaskInterface.register(NAME, _no_mask)
    try:
        model.set_attn_implementation(NAME)
        problem = _difference(model.base_model, device)
    except (InexactAttentionError, TypeError, ValueError, KeyError, AttributeError, IndexError, RuntimeError) as error:
        problem = " ".join(str(error).split())[:200] or type(error).__name__
    if problem:
        model.set_attn_implementation(before)
    return problem


def _difference(trunk: Any, device: torch.device) -> str:
    vocabulary = int(trunk.get_input_embeddings().num_embeddings)
    ids = np.random.default_rng(0).integers(0, vocabulary, max(_PROBE_LENGTHS) + len(_PROBE_LENGTHS))
    sequences = [np.append(ids[:_PROBE_PREFIX], ids[n : n + length]) for n, length in enumerate(_PROBE_LENGTHS)]

    def put(values: Array) -> Tensor:
        return torch.from_numpy(values).to(device)

    alone = torch.cat([trunk(input_ids=put(one)[None], use_cache=False).last_hidden_state[0] for one in sequences])
    row = SharedRow.of(sequences)
    packed = {"position_ids": put(row.places)[None], "packing": pack_row(row.indices, device)}
    states = trunk(input_ids=put(row.token_ids)[None], **packed, use_cache=False).last_hidden_state[0]
    together = states[put(np.concatenate(row.indices))]
    largest = float((together - alone).abs().max()) / max(float(alone.abs().max()), 1e-12)
    if largest <= _TOLERANCE[alone.dtype]:
        return ""
    return f"packed sequences differ from single ones by {largest:.1g} of the largest value"
