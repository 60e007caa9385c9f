"""Causal attention whose result for a query does not depend on the queries computed with it.

Keys are read in blocks of ``KEYS`` from the first one, and queries in tiles of ``QUERIES``, so all
matrix products have the same shape. The softmax is accumulated over the blocks (Milakov and
Gimelshein 2018, arXiv:1805.02867). A block that a query does not see changes none of its bits:
exp(0) is 1, and what is added is 0. So a query computed alone over cached keys, as a server
decodes, gives what it gives within its whole sequence, as a learner trains.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor

from rlearner_text.exact.tiled_rows import map_elements

# Of one block. Short sequences compute a whole one.
KEYS: Final = 64
# Rows of one product of queries and keys.
QUERIES: Final = 16
# Products of one call: their keys are copied for each tile of queries.
_PRODUCTS: Final = 256


def attend_rows(
    query: Tensor, keys: Tensor, values: Tensor, last: Tensor, *, scaling: float
) -> Tensor:
    """Return attention of queries over the keys up to each one's last, (n, rows, value width).

    Args:
        query: (n, rows, width); n are sequences and key-value heads.
        keys: (n, length, width).
        values: (n, length, value width). What no query sees must be finite.
        last: (n, rows) int64, the number of the last key that a row sees.
        scaling: of scores.

    Returns:
        In the dtype of ``query``; computed in float32.
    """
    count, num_rows, width = query.shape
    missing = -num_rows % QUERIES
    scaled = query.float() * scaling
    if missing:
        scaled = torch.cat([scaled, scaled.new_zeros(count, missing, width)], 1)
        last = torch.cat([last, last.new_zeros(count, missing)], 1)
    num_tiles = (num_rows + missing) // QUERIES
    tiles = scaled.view(count, num_tiles, QUERIES, width)
    seen = last.view(count, num_tiles, QUERIES, 1)
    step = max(1, _PRODUCTS // count)
    parts = []
    for start in range(0, num_tiles, step):
        part = slice(start, start + step)
        parts.append(_attend_tiles(tiles[:, part], keys, values, seen[:, part]))
    attended = torch.cat(parts, 1) if len(parts) > 1 else parts[0]
    return attended.view(count, num_rows + missing, -1)[:, :num_rows].to(query.dtype)


def attend_causally(query: Tensor, key: Tensor, value: Tensor, *, scaling: float) -> Tensor:
    """Return causal attention of whole sequences, (rows, heads, tokens, value width).

    Args:
        query: (rows, heads, tokens, width).
        key: (rows, KV heads, tokens, width), as ``value``, whose width may differ.
    """
    num, heads, length, width = query.shape
    kv_heads = key.shape[1]
    groups = heads // kv_heads
    # Rows of a tile are of neighbouring tokens, which see the same blocks.
    folded = query.view(num, kv_heads, groups, length, width).transpose(2, 3)
    folded = folded.reshape(num * kv_heads, length * groups, width)
    last = torch.arange(length, device=query.device).repeat_interleave(groups)
    attended = attend_rows(
        folded,
        key.reshape(num * kv_heads, length, width),
        value.reshape(num * kv_heads, length, value.shape[-1]),
        last.expand(num * kv_heads, -1),
        scaling=scaling,
    )
    attended = attended.view(num, kv_heads, length, groups, -1).transpose(2, 3)
    return attended.reshape(num, heads, length, -1)


class _Softmax(NamedTuple):
    """What the blocks so far add up to, for each query: (…, 1), (…, 1) and (…, value width).

    Attributes:
        peak: the highest score.
        total: of the weights exp(score - peak).
        output: the values, weighted by these.
    """

    peak: Tensor
    total: Tensor
    output: Tensor


def _attend_tiles(tiles: Tensor, keys: Tensor, values: Tensor, seen: Tensor) -> Tensor:
    """Return attention of tiles, (n, tiles, QUERIES, value width), in float32.

    Args:
        tiles: (n, tiles, QUERIES, width) float32, scaled.
        seen: (n, tiles, QUERIES, 1).
    """
    count, num_tiles, _, width = tiles.shape
    flat = tiles.reshape(-1, QUERIES, width)
    lowest = int(seen.min())
    highest = int(seen.max())
    sums: _Softmax | None = None
    for start in range(0, highest + 1, KEYS):
        block_keys = _block(keys, start, num_tiles)
        scores = torch.bmm(flat, block_keys.transpose(1, 2)).view(count, num_tiles, QUERIES, KEYS)
        if start + KEYS > lowest + 1:
            numbers = torch.arange(start, start + KEYS, device=tiles.device)
            scores = scores.masked_fill(numbers > seen, -torch.inf)
        sums = _accumulate(sums, scores, _block(values, start, num_tiles))
    assert sums is not None, "every query sees the first key"
    return sums.output / sums.total


def _accumulate(sums: _Softmax | None, scores: Tensor, values: Tensor) -> _Softmax:
    """Add a block of scores, (…, QUERIES, KEYS), and its values; None: the first block."""
    peak = scores.amax(-1, keepdim=True)
    if sums is not None:
        peak = torch.maximum(sums.peak, peak)
    weights = map_elements(torch.exp, scores - peak)
    total = weights.sum(-1, keepdim=True)
    output = torch.bmm(weights.view(-1, QUERIES, KEYS), values).view(*scores.shape[:-1], -1)
    if sums is None:
        return _Softmax(peak, total, output)
    kept = map_elements(torch.exp, sums.peak - peak)
    return _Softmax(peak, sums.total * kept + total, sums.output * kept + output)


def _block(states: Tensor, start: int, num_tiles: int) -> Tensor:
    """Return a block of keys or values for each tile, (n * tiles, KEYS, width), in float32."""
    block = states[:, start : start + KEYS].float()
    count, size, width = block.shape
    if size < KEYS:
        block = torch.cat([block, block.new_zeros(count, KEYS - size, width)], 1)
    if num_tiles == 1:
        return block
    return block[:, None].expand(-1, num_tiles, -1, -1).reshape(-1, KEYS, width)
