"""Attention for packed rows of a transformers model: each sequence of a row attends only to itself.

transformers separates packed sequences by position ids and masks them with a dense (row, row) matrix, so attention
costs the square of the row. Here the row is split for attention only: sequences of similar length become the rows of a
small batch for the causal kernel, which needs no mask; all other layers see the row without padding.

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

NAME: Final = "rlearner_packed"
MAX_LENGTH_RATIO: Final = 1.25  # longest to shortest sequence of one call; attention of the padding is wasted
_PROBE_LENGTHS: Final = (3, 1, 7, 6, 12)
_TOLERANCE: Final = {torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.02}  # relative; a leak is about 1


class InexactAttentionError(Exception):
    """The model's attention is not plain causal attention."""


@dataclass(frozen=True)
class RowPiece:
    """Neighbouring sequences of similar length in a row."""

    start: int  # tokens before it
    stop: int
    num: int  # sequences
    longest: int
    spread: Tensor | None  # (num * longest,) int64, token of the piece for each place of the batch; None: one to one
    gather: Tensor | None  # (stop - start,) int64, the inverse

    def rows(self, states: Tensor) -> Tensor:
        """(1, heads, row, width) to (num, heads, longest, width)."""
        tokens = states[0, :, self.start : self.stop]
        if self.spread is not None:
            tokens = tokens.index_select(1, self.spread)
        return tokens.reshape(len(tokens), self.num, self.longest, -1).transpose(0, 1)

    def flat(self, rows: Tensor) -> Tensor:
        """(num, heads, longest, width) to (stop - start, heads, width)."""
        tokens = rows.transpose(1, 2).flatten(0, 1)
        return tokens if self.gather is None else tokens.index_select(0, self.gather)


class PackedRow:
    """The pieces of a row; not a list, which torch.compile would inspect and compile for each layout."""

    def __init__(self, pieces: Sequence[RowPiece]) -> None:
        self.pieces = pieces


def piece_layout(lengths: Sequence[int], device: torch.device) -> list[RowPiece]:
    """Group neighbouring sequences of similar length into pieces.

    Args:
        lengths: tokens of each sequence, in the order of the row, all above 0; sorted lengths need the fewest pieces.
    """
    pieces: list[RowPiece] = []
    start, first = 0, 0
    while first < len(lengths):
        last, low, high = first + 1, lengths[first], lengths[first]
        while last < len(lengths) and max(high, lengths[last]) <= MAX_LENGTH_RATIO * min(low, lengths[last]):
            low, high, last = min(low, lengths[last]), max(high, lengths[last]), last + 1
        pieces.append(_piece(np.asarray(lengths[first:last]), start, device))
        start, first = pieces[-1].stop, last
    return pieces


def _piece(lengths: np.ndarray[Any, Any], start: int, device: torch.device) -> RowPiece:
    num, longest, total = len(lengths), int(lengths.max()), int(lengths.sum())
    if num * longest == total:
        return RowPiece(start, start + total, num, longest, None, None)
    firsts, places = np.cumsum(lengths) - lengths, np.arange(longest)
    # Places after a sequence's end repeat its last token; no token sees them, and their results are dropped.
    spread = (firsts[:, None] + np.minimum(places, lengths[:, None] - 1)).ravel()
    gather = np.flatnonzero(places < lengths[:, None])
    indices = [torch.from_numpy(places).to(device) for places in (spread, gather)]
    return RowPiece(start, start + total, num, longest, *indices)


def positions(lengths: Sequence[int]) -> np.ndarray[Any, Any]:
    """Return each token's place in its own sequence, (row,) int64."""
    return np.concatenate([np.arange(length) for length in lengths])


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
    parts = [piece.flat(attend(piece.rows(query), piece.rows(key), piece.rows(value))) for piece in packing.pieces]
    return (parts[0] if len(parts) == 1 else torch.cat(parts))[None]


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
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, vocabulary, sum(_PROBE_LENGTHS))).to(device)
    rows = torch.split(ids, list(_PROBE_LENGTHS))
    alone = torch.cat([trunk(input_ids=row[None], use_cache=False).last_hidden_state[0] for row in rows])
    where = torch.from_numpy(positions(_PROBE_LENGTHS)).to(device)
    packed = {"position_ids": where[None], "packing": PackedRow(piece_layout(_PROBE_LENGTHS, device))}
    together = trunk(input_ids=ids[None], **packed, use_cache=False).last_hidden_state[0]
    largest = float((together - alone).abs().max()) / max(float(alone.abs().max()), 1e-12)
    if largest <= _TOLERANCE[alone.dtype]:
        return ""
    return f"packed sequences differ from single ones by {largest:.1g} of the largest value"
