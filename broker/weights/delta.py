"""Exact differences between a bucket and the bytes that the receivers hold.

A bucket is read as words of the size of the model's elements. Its difference is

    counts     uint32, one for each started block of 65,536 words: how many of its words changed
    positions  uint16, of each changed word within its block, blocks and words in order
    values     the changed words; they begin on a multiple of 8 bytes

so a changed element costs its own bytes and two more. Words are compared as integers: -0.0 differs
from 0.0, and a NaN equals itself.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from torch import Tensor

from broker.errors import TransferFailed
from broker.weights.plan import ITEM_BYTES, LayoutPlan

BLOCK_BITS: Final = 16
BLOCK_WORDS: Final = 1 << BLOCK_BITS
WORDS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def word_bytes(plan: LayoutPlan) -> int:
    """Return the element size of most of the model's bytes."""
    totals = dict.fromkeys(WORDS, 0)
    for slot in plan.slots:
        totals[ITEM_BYTES[slot.spec.dtype]] += slot.spec.size_bytes
    return max(totals, key=lambda size: totals[size])


def difference(new: Tensor, base: Tensor, word: int) -> Tensor | None:
    """Return the difference that turns ``base`` into ``new``; None if the whole bucket is not
    larger.

    Args:
        new, base: uint8, shape (n,), n a multiple of 8, on one device.
        word: bytes of a word, a key of ``WORDS``.

    Returns:
        uint8, on that device.
    """
    words = new.view(WORDS[word])
    base_words = base.view(WORDS[word])
    changed = _changed(words, base_words)
    start, middle, stop = _layout(len(words), len(changed), word)
    if stop >= len(new):
        return None
    difference = torch.zeros(stop, dtype=torch.uint8, device=new.device)
    difference[:start].view(torch.int32).copy_(
        torch.bincount(changed >> BLOCK_BITS, minlength=start // 4)
    )
    # wraps: these are the bits of uint16
    difference[start : start + 2 * len(changed)].view(torch.int16).copy_(
        changed & (BLOCK_WORDS - 1)
    )
    torch.index_select(words, 0, changed, out=difference[middle:].view(WORDS[word]))
    return difference


def apply(data: Tensor, bucket: Tensor, word: int) -> None:
    """Apply a difference to ``bucket`` in place.

    Raises:
        TransferFailed: if it does not fit a bucket of this size; the bucket is unchanged.
    """
    words = bucket.view(WORDS[word])
    num_blocks = -(-len(words) // BLOCK_WORDS)
    if len(data) < 4 * num_blocks:
        raise TransferFailed(
            f"a difference of {len(data)} bytes lacks the counts of {num_blocks} blocks"
        )
    counts = data[: 4 * num_blocks].view(torch.int32).long()
    total = int(counts.sum())
    start, middle, stop = _layout(len(words), total, word)
    if int(counts.min()) < 0 or stop != len(data):
        raise TransferFailed(
            f"a difference of {len(data)} bytes announces {total} words of {word} bytes"
        )
    positions = data[start : start + 2 * total].view(torch.int16).long() & (BLOCK_WORDS - 1)
    starts = torch.arange(num_blocks, device=data.device) * BLOCK_WORDS
    index = positions + torch.repeat_interleave(starts, counts, output_size=total)
    if total and int(index.max()) >= len(words):
        raise TransferFailed(f"a difference changes word {int(index.max())} of {len(words)}")
    words.index_copy_(0, index, data[middle:].view(WORDS[word]))


def _changed(words: Tensor, base_words: Tensor) -> Tensor:
    """Return the indices of the words that differ, int64, ascending."""
    if words.is_cpu:  # several times as fast as torch on one core
        return torch.from_numpy(np.flatnonzero(words.numpy() != base_words.numpy()))
    return torch.ne(words, base_words).nonzero().view(-1)


def _layout(num_words: int, num_changed: int, word: int) -> tuple[int, int, int]:
    """Return where positions and values begin, and the total size, in bytes."""
    start = 4 * -(-num_words // BLOCK_WORDS)
    middle = -(-(start + 2 * num_changed) // 8) * 8
    return start, middle, middle + num_changed * word
