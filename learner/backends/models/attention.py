"""The learner's attention for transformers models: causal, windows, chunks, soft caps and sinks.

transformers separates packed sequences by position ids and masks them with a dense (row, row)
matrix, so attention costs the square of the row; its SDPA function silently drops soft caps and
sinks. Here each sequence of a packed row attends by itself, as does each row of a padded batch;
padding needs no mask, since no token sees those after it. Plain causal attention uses torch's
kernel without a mask. Windows and chunks are computed for blocks of queries with the keys that they
can see, so that the cost grows with the window and not with the sequence.

Every argument is either used or known to have no effect; any other is an error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from learner.backends.models.packed_rows import PackedRow

NAME: Final = "rlearner"
# Of a block. A larger block of a window has more keys that only few of its queries see.
_MAX_QUERIES: Final = 512
# Of a block, 256 MiB in float32: what attention may hold in addition to its results.
_MAX_SCORES: Final = 1 << 26
# Keys up to which a CPU computes attention in float32.
FLOAT32_KEYS: Final = 512
# Arguments of transformers that change nothing in attention: queries and keys have their positions
# already.
_IRRELEVANT: Final = frozenset({
    "position_ids", "use_cache", "cache_position", "past_key_values", "output_attentions",
    "output_hidden_states", "output_router_logits", "return_dict", "logits_to_keep",
    "num_items_in_batch", "token_type_ids", "mm_token_type_ids",
})  # fmt: skip


class InexactAttentionError(Exception):
    """The model's attention needs more than this module computes."""


class AttentionPattern:
    """Which of the ``size`` last tokens a token sees; replaces the mask of transformers.

    Args:
        function: of transformers: row, head, query and key indices to whether the query sees the
            key.
        size: no query sees a key that is ``size`` or more tokens before it.
    """

    def __init__(self, function: Callable[..., Tensor], size: int, device: torch.device) -> None:
        self.size = size
        self._function = function
        self._device = device
        # All layers of a pass need the same masks.
        self._masks: dict[tuple[int, int, int], Tensor] = {}

    def mask(self, low: int, start: int, stop: int) -> Tensor:
        """Return, as bool, which keys from ``low`` on the queries from ``start`` on see."""
        if (mask := self._masks.get((low, start, stop))) is None:
            places = torch.arange(low, stop, device=self._device)
            first = places.new_zeros(())
            mask = self._function(first, first, places[start - low :, None], places[None])
            self._masks[low, start, stop] = mask
        return mask


@dataclass(frozen=True)
class SequenceAttention:
    """Attention of queries, keys and values, (rows, heads, tokens, width), to the same shape.

    Attributes:
        scaling: of scores; None for one by the root of the width.
        pattern: None if every token sees all tokens before it.
        softcap: largest absolute score, by tanh.
        sinks: (heads,), a score of each head that takes weight from all tokens.
    """

    scaling: float | None = None
    pattern: AttentionPattern | None = None
    softcap: float | None = None
    sinks: Tensor | None = None

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Compute it."""
        rows, heads, length, _ = query.shape
        kv_heads = key.shape[1]
        is_local = self.pattern is not None and self.pattern.size < length
        is_plain = self.softcap is None and self.sinks is None
        if is_plain and not is_local:
            return attend_plainly(query, key, value, scaling=self.scaling)
        # Kernels that take a mask need as many heads of keys as of queries.
        if heads != kv_heads:
            key, value = (states.repeat_interleave(heads // kv_heads, 1) for states in (key, value))
        size = self.pattern.size if is_local and self.pattern is not None else length
        step = max(1, min(_MAX_QUERIES, _MAX_SCORES // (rows * heads * size)))
        attend_block: Callable[..., Tensor] = self._attend_fully
        if is_plain:
            attend_block = partial(attend_plainly, scaling=self.scaling)
        blocks: list[Tensor] = []
        for start in range(0, length, step):
            stop = min(start + step, length)
            low = max(0, start - size + 1)
            mask = self._mask(low, start, stop, query.device)
            keys = slice(low, stop)
            block = attend_block(query[:, :, start:stop], key[:, :, keys], value[:, :, keys], mask)
            blocks.append(block)
        return blocks[0] if len(blocks) == 1 else torch.cat(blocks, 2)

    def _mask(self, low: int, start: int, stop: int, device: torch.device) -> Tensor:
        if self.pattern is not None:
            return self.pattern.mask(low, start, stop)
        return torch.ones(stop - start, stop - low, dtype=torch.bool, device=device).tril(
            start - low
        )

    def _attend_fully(self, *tensors: Tensor) -> Tensor:
        # The backward pass computes a block again: its scores in float32 would otherwise be most of
        # a model's activations.
        repeated = partial(
            checkpoint, self._attend_block, use_reentrant=False, preserve_rng_state=False
        )
        result: Tensor = repeated(*tensors)
        return result

    def _attend_block(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        scaling = query.shape[-1] ** -0.5 if self.scaling is None else self.scaling
        scores = query @ key.transpose(-1, -2) * scaling
        if self.softcap is not None:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        scores = scores.float().masked_fill(~mask, -torch.inf)
        if self.sinks is None:
            return scores.softmax(-1).to(query.dtype) @ value
        sinks = self.sinks.float()[None, :, None, None].expand(*scores.shape[:3], 1)
        weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
        return weights.to(query.dtype) @ value


def attend_plainly(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, *, scaling: float | None
) -> Tensor:
    """Use torch's kernel, causally if there is no mask."""
    dtype = query.dtype
    # on a CPU its backward pass for bfloat16 takes more than twice as long as that for float32
    # where sequences are short
    if dtype == torch.bfloat16 and query.device.type == "cpu" and key.shape[2] <= FLOAT32_KEYS:
        query, key, value = query.float(), key.float(), value.float()
    attended = functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        scale=scaling,
        is_causal=mask is None,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return attended.to(dtype)


def compute_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: AttentionPattern | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    packing: PackedRow | None = None,
    kind: type[SequenceAttention] = SequenceAttention,
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute attention for transformers.

    Args:
        query: (rows, heads, tokens, width), as are key and value, with fewer heads where heads
            share them.
        attention_mask: what ``describe_mask`` returned.
        packing: of the only row.
        kind: what computes the attention of rows.

    Returns:
        (rows, tokens, heads, width), and no attention weights.

    Raises:
        InexactAttentionError: if the model needs more.
    """
    unknown = [
        name for name, value in options.items() if value is not None and name not in _IRRELEVANT
    ]
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    if unknown or dropout or not is_causal or options.get("output_attentions"):
        raise InexactAttentionError(
            f"its attention has {' and '.join(unknown) or 'dropout, or sees later tokens'}"
        )
    if attention_mask is not None and not isinstance(attention_mask, AttentionPattern):
        raise InexactAttentionError("its attention has a mask of its own")
    if query.shape[2] != key.shape[2]:
        raise InexactAttentionError("its attention has more keys than queries")
    if sliding_window is not None and attention_mask is None:
        raise InexactAttentionError(
            f"its attention has a window of {sliding_window} that its mask does not have"
        )
    form = kind(scaling, attention_mask, softcap, s_aux)
    return attend_sequences(form, query, key, value, packing), None


@torch.compiler.disable  # type: ignore[untyped-decorator]
def attend_sequences(
    form: SequenceAttention, query: Tensor, key: Tensor, value: Tensor, packing: PackedRow | None
) -> Tensor:
    """Return attention of each row, or of each sequence of the only row.

    Returns:
        (rows, tokens, heads, width).
    """
    if packing is None:
        return form(query, key, value).transpose(1, 2)
    parts = zip(packing.rows(query), packing.rows(key), packing.rows(value), strict=True)
    return packing.flat([form(*part) for part in parts])[None]


def describe_mask(
    *_: Any,
    mask_function: Callable[..., Tensor],
    q_length: int,
    kv_length: int,
    device: torch.device,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    **options: Any,
) -> AttentionPattern | None:
    """Return what ``compute_attention`` needs of a mask; None for plain causal attention.

    Raises:
        InexactAttentionError: if the mask depends on more than the distance or the chunk of tokens.
    """
    from transformers.masking_utils import causal_mask_function

    if use_vmap or not allow_is_causal_skip or q_length != kv_length:
        raise InexactAttentionError("its attention has a mask of its own")
    if local_size is not None:
        return AttentionPattern(mask_function, int(local_size), device)
    if mask_function is not causal_mask_function:
        raise InexactAttentionError("its attention is not plainly causal")
    return None


def register_attention() -> None:
    """Make the attention of this module known to transformers as NAME."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, compute_attention)
    AttentionMaskInterface.register(NAME, describe_mask)
