"""Attention over KV slots for transformers models that use the AttentionInterface.

A forward pass concatenates the new tokens of all sequences into one row without padding: one token
of a decoding sequence, many of a sequence in prefill. Everything but attention treats them alike.
Attention writes the new keys and values into the sequences' slots and reads each slot up to its
length, so sequences of any length share a pass, and enter and leave between passes.

What a token sees follows from the mask that transformers makes for the layer (``mask_rule``), not
from the arguments of the attention function: windows and chunks are in the mask only, for some
models.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from broker.errors import UserError
from rlearner_text.exact.blockwise_attention import attend_rows
from rollout.engines.hf.forward_pass import ForwardPass, PassLayout, Segment, SegmentBlock
from rollout.engines.hf.mask_rule import MaskRule, mask_rule


class SlotAttention:
    """The attention function of one model and its KV cache.

    ``current`` is the pass under way: a Pass reads and writes slots; None is one causal sequence
    that uses no slot. ``is_capped`` tells whether a layer caps its scores, which PyTorch's fused
    attention does not do. While ``discovers`` is set, a pass finds out what each layer keeps.

    Args:
        exact: the result for a token has the same bits in any pass (``rollout.exact``).
    """

    def __init__(self, device: torch.device, *, exact: bool = False) -> None:
        self.device = device
        self.exact = exact
        self.current: PassLayout | None = None
        self.is_capped = False
        self.discovers = False
        # layer: KV heads, key size, value size, dtype
        self.shapes: dict[int, tuple[int, int, int, torch.dtype]] = {}
        self._attend = _attend_exactly if exact else _attend
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}

    @property
    def bytes_per_token(self) -> int:
        """KV bytes per token over all layers seen so far."""
        return sum(heads * (k + v) * dtype.itemsize for heads, k, v, dtype in self.shapes.values())

    def allocate(self, num_slots: int, max_context: int) -> None:
        """Allocate the cache of every layer that a pass without slots has discovered."""
        for layer, (heads, k, v, dtype) in self.shapes.items():
            shape = (num_slots, heads, max_context)
            self._keys[layer] = _make_cache((*shape, k), dtype, self.device)
            self._values[layer] = _make_cache((*shape, v), dtype, self.device)

    def free(self) -> None:
        """Drop the cache; ``allocate`` makes it again."""
        self._keys.clear()
        self._values.clear()

    def copy(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """Copy the first ``length`` tokens of slots to others, none of which is a source."""
        read = torch.tensor(sources, device=self.device)
        written = torch.tensor(targets, device=self.device)
        for cache in (*self._keys.values(), *self._values.values()):
            cache[written, :, :length] = cache[read, :, :length]

    def wipe(self, slot: int) -> None:
        """Zero a slot that may hold NaN: values beyond a sequence's end have weight 0, and 0 times
        NaN is NaN.
        """
        for cache in (*self._keys.values(), *self._values.values()):
            cache[slot].zero_()

    def __call__(
        self,
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        """Compute attention as transformers calls it: query (1, heads, rows, size), result (1,
        rows, heads, size).
        """
        if others.get("position_bias") is not None or others.get("is_causal") is False:
            raise UserError(
                f"engine hf does not run {type(module).__name__}: only plain causal attention is supported"
            )
        shape = _How(key.shape[1], query.shape[1] // key.shape[1], scaling, softcap, s_aux)
        rule = mask_rule(attention_mask, type(module).__name__)
        self.is_capped = self.is_capped or softcap is not None
        if self.exact and (rule is not None or softcap is not None or s_aux is not None):
            raise UserError("rollout.exact has no attention with windows, caps or sinks")
        layer = int(module.layer_idx)  # type: ignore[arg-type]  # every attention module in transformers has one
        if self.current is None:
            if self.discovers and layer in self.shapes:
                raise UserError(f"layer {layer} attends twice")
            self.shapes[layer] = (key.shape[1], key.shape[-1], value.shape[-1], key.dtype)
            rows = query.shape[2]
            alone = ForwardPass([Segment(0, 0, rows)], rows, self.device)
            block = alone.blocks[0]
            mask = alone.mask(block, shape.groups, rule, query.dtype)
            return self._attend(query, key, value, mask=mask, block=block, shape=shape)[None], None
        return self._slotted(
            self.current, layer, query, key=key, value=value, rule=rule, shape=shape
        )[None], None

    def _slotted(
        self,
        now: PassLayout,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rule: MaskRule | None,
        shape: _How,
    ) -> Tensor:
        keys = self._keys[layer]
        values = self._values[layer]
        index = now.index(shape.kv_heads)
        for cache, new in ((keys, key), (values, value)):
            _cache_rows(cache).index_copy_(
                0, index, new[0].transpose(0, 1).reshape(-1, cache.shape[-1])
            )
        outputs = []
        for block in now.blocks:
            mask = now.mask(block, shape.groups, rule, query.dtype)
            keys_here = now.read(keys, block)
            values_here = now.read(values, block)
            outputs.append(
                self._attend(query, keys_here, values_here, mask=mask, block=block, shape=shape)
            )
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _make_cache(
    shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return zeros of shape (slots, KV heads, max_context, head size), in memory of one more row."""
    size = math.prod(shape[:3])
    return _zeros((size + 1, shape[3]), dtype, device)[:size].view(shape)


def _cache_rows(cache: Tensor) -> Tensor:
    """Return a cache as rows (slots * KV heads * max_context + 1, head size).

    No slot has the last row: the idle rows of a static pass write to it, and nothing reads it.
    """
    size = cache.shape[3]
    return cache.as_strided((cache.numel() // size + 1, size), (size, 1), 0)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros; on the CPU from calloc, whose pages cost nothing until written."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return (
        torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8))
        .view(dtype)
        .view(shape)
    )


@dataclass(frozen=True, slots=True)
class _How:
    """Attention parameters of a layer; ``groups``: query heads per KV head, ``sinks``: one logit
    per head.
    """

    kv_heads: int
    groups: int
    scale: float | None
    softcap: float | None
    sinks: Tensor | None


def _attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    block: SegmentBlock,
    shape: _How,
) -> Tensor:
    """Compute attention of one block, shape (rows of the block, heads, head size).

    ``query`` is (1, heads, all rows of the pass, head size), ``keys`` and ``values`` are (segments,
    KV heads, length, head size). Query heads that share a KV head are concatenated like additional
    queries, so no key is copied.
    """
    # nothing to fold
    if block.new == 1 and shape.groups == 1 and shape.softcap is None and shape.sinks is None:
        rows = query[0, :, block.rows].transpose(0, 1)[:, :, None]
        return F.scaled_dot_product_attention(
            rows, keys, values, attn_mask=mask, scale=shape.scale
        )[:, :, 0]
    folded = _folded(query, block, shape)
    if shape.softcap is None and shape.sinks is None:
        out = F.scaled_dot_product_attention(
            folded, keys, values, attn_mask=mask, scale=shape.scale
        )
    else:
        out = _explicit(folded, keys, values, mask=mask, block=block, shape=shape)
    return _unfolded(out, block, shape)


def _folded(query: Tensor, block: SegmentBlock, shape: _How) -> Tensor:
    """Return queries with those that share a KV head, (segments, KV heads, groups * new, size)."""
    folded = query[0, :, block.rows].view(
        shape.kv_heads, shape.groups, block.size, block.new, query.shape[-1]
    )
    return folded.permute(2, 0, 1, 3, 4).reshape(
        block.size, shape.kv_heads, shape.groups * block.new, query.shape[-1]
    )


def _unfolded(out: Tensor, block: SegmentBlock, shape: _How) -> Tensor:
    """Return the result for folded queries as (rows of the block, heads, size)."""
    out = out.view(block.size, shape.kv_heads, shape.groups, block.new, -1).permute(0, 3, 1, 2, 4)
    return out.reshape(block.size * block.new, shape.kv_heads * shape.groups, -1)


def _attend_exactly(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    block: SegmentBlock,
    shape: _How,
) -> Tensor:
    """Compute what ``_attend`` does with the same bits in any block; ``mask`` is plainly causal."""
    folded = _folded(query, block, shape)
    batch = block.size * shape.kv_heads
    starts = torch.tensor(block.starts, device=query.device)
    last = starts[:, None] + torch.arange(block.new, device=query.device)
    last = last[:, None, None].expand(-1, shape.kv_heads, shape.groups, -1)
    out = attend_rows(
        folded.reshape(batch, -1, folded.shape[-1]),
        keys.reshape(batch, -1, keys.shape[-1]),
        values.reshape(batch, -1, values.shape[-1]),
        last.reshape(batch, -1),
        scaling=query.shape[-1] ** -0.5 if shape.scale is None else shape.scale,
    )
    return _unfolded(out, block, shape)


def _explicit(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    block: SegmentBlock,
    shape: _How,
) -> Tensor:
    """Compute attention without the fused kernel, which lacks soft-capped logits (Gemma 2) and
    sinks (gpt-oss).
    """
    scale = shape.scale if shape.scale is not None else query.shape[-1] ** -0.5
    scores = torch.matmul(query, keys.transpose(2, 3)) * scale
    if shape.softcap is not None:
        scores = torch.tanh(scores / shape.softcap) * shape.softcap
    if mask is not None:
        scores = scores + mask
    if shape.sinks is not None:
        sinks = shape.sinks.view(1, shape.kv_heads, shape.groups, 1).expand(
            block.size, -1, -1, block.new
        )
        scores = torch.cat([scores, sinks.reshape(*scores.shape[:-1], 1).to(scores.dtype)], dim=-1)
    probs = scores.softmax(-1, dtype=torch.float32).to(values.dtype)
    return torch.matmul(probs[..., : keys.shape[2]], values)
