"""Rounds float32 to bfloat16 so that small changes are not lost.

bfloat16 has 8 significant bits. Pretrained weights lie on its grid, and an update of reinforcement
learning moves most of them by much less than half a step of it: rounded to nearest, they would stay
what they were for dozens of steps, and an engine would sample from a policy that hardly moves. Here
each element has a threshold of its own, spread evenly over the step: of the elements that moved by
a tenth of a step, a tenth is rounded up. So the sum of many weights follows their float32 values,
an element changes once when it passes its threshold, and the same values always give the same
bytes. What lies on the grid stays there.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import numpy as np
import torch
from torch import Tensor

# Elements after which thresholds repeat: a prime, so that they do not line up with a matrix's rows.
PERIOD: Final = 65537
DROPPED_BITS: Final = 16  # of float32's 24 significant bits
# Rows of a period that are rounded at a time: few enough for the cache of a core, or for a GPU's
# memory next to the model.
ROWS: Final = {"cpu": 8, "cuda": 512}


def is_rounded(target: torch.dtype, source: torch.dtype) -> bool:
    """Return whether a copy between these dtypes rounds by thresholds."""
    return target == torch.bfloat16 and source == torch.float32


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor in another dtype, as ``copy_into`` would write it; itself if it has it."""
    if not is_rounded(dtype, tensor.dtype):
        return tensor.to(dtype)
    rounded = torch.empty(tensor.shape, dtype=dtype, device=tensor.device)
    round_into(rounded, tensor)
    return rounded


@torch.no_grad()
def round_into(target: Tensor, source: Tensor, first: int = 0) -> None:
    """Round a float32 tensor into a bfloat16 one of its shape, on any devices.

    Args:
        first: position of the first element in the whole tensor, where this is a part of it.
    """
    if source.device != target.device or not target.is_contiguous():
        rounded = torch.empty(source.shape, dtype=torch.bfloat16, device=source.device)
        round_into(rounded, source, first)
        target.copy_(rounded)
        return
    bits = source.contiguous().view(-1).view(torch.int32)
    rounded_bits = target.view(-1).view(torch.int16)
    thresholds = _thresholds(source.device)
    if first % PERIOD:
        thresholds = thresholds.roll(-(first % PERIOD))
    step = ROWS.get(source.device.type, 8) * PERIOD
    for start in range(0, len(bits), step):
        part = bits[start : start + step]
        size = len(part) // PERIOD * PERIOD
        raised = torch.empty_like(part)
        whole = part[:size].view(-1, PERIOD)
        torch.add(whole, thresholds, out=raised[:size].view(-1, PERIOD))
        torch.add(part[size:], thresholds[: len(part) - size], out=raised[size:])
        rounded_bits[start : start + step] = raised >> DROPPED_BITS
    # The sum may leave the range of NaN's bits, at either end.
    target.masked_fill_(source.isnan(), torch.nan)


@lru_cache(maxsize=8)
def _thresholds(device: torch.device) -> Tensor:
    """Return what is added to the dropped bits of each element, 0 to 65535, (PERIOD,) int32."""
    mixed = np.arange(PERIOD, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(29)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    # Their ranks, so that each threshold occurs once in a period.
    ranks = np.argsort(np.argsort(mixed)) % (1 << DROPPED_BITS)
    return torch.from_numpy(ranks.astype(np.int32)).to(device)
