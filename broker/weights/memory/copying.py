"""Copies of tensors at memory speed."""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeAlias

import numpy as np
import torch
from torch import Tensor

from broker.weights.rounding import is_rounded, round_into

Bytes: TypeAlias = np.ndarray[tuple[int], np.dtype[np.uint8]]

LARGE_BYTES: Final = 1 << 16  # below, the overhead exceeds the gain
PIECE_BYTES: Final = 1 << 22  # copied by a thread at a time
MAX_THREADS: Final = 8  # more do not help: memory is the limit


def copy_into(
    target: Tensor, source: Tensor, *, first: int = 0, non_blocking: bool = False
) -> None:
    """Do ``target.copy_(source)``, with a cast if the dtypes differ; float32 becomes bfloat16 by
    ``round_into``.

    Plain bytes within host memory are copied by the C library, which bypasses the caches, unlike
    torch's loop (14 against 9 GB/s on the machine of docs/performance.md).

    Args:
        first: position of the first element in the whole tensor, where these are parts of it.
    """
    if is_rounded(target.dtype, source.dtype):
        round_into(target, source, first)
    elif is_plain(target, source):
        np.copyto(_bytes(target), _bytes(source))
    else:
        target.copy_(source, non_blocking=non_blocking)


def copy_all(pairs: Iterable[tuple[Tensor, Tensor]], num_threads: int | None = None) -> None:
    """Apply ``copy_into`` to (target, source) pairs that do not overlap, in several threads; return
    once all is copied.

    Args:
        num_threads: None: one per available processor, at most 8.
    """
    threads = min(num_threads or len(os.sched_getaffinity(0)), MAX_THREADS)
    pieces: list[tuple[Bytes, Bytes]] = []
    for target, source in pairs:
        if threads > 1 and is_plain(target, source):
            into = _bytes(target)
            out_of = _bytes(source)
            parts = [
                slice(start, start + PIECE_BYTES) for start in range(0, len(into), PIECE_BYTES)
            ]
            pieces += ((into[part], out_of[part]) for part in parts)
        else:
            copy_into(target, source)
    if pieces:
        with ThreadPoolExecutor(threads, "weights-copy") as pool:
            for share in [pool.submit(_copy, pieces[first::threads]) for first in range(threads)]:
                share.result()


def is_plain(target: Tensor, source: Tensor) -> bool:
    """Return whether it is a copy of many bytes, without a cast, within host memory."""
    is_same_layout = (
        target.dtype == source.dtype
        and target.shape == source.shape
        and target.is_cpu
        and source.is_cpu
    )
    return (
        is_same_layout
        and target.nbytes >= LARGE_BYTES
        and target.is_contiguous()
        and source.is_contiguous()
    )


def _copy(pieces: list[tuple[Bytes, Bytes]]) -> None:
    for into, out_of in pieces:
        np.copyto(into, out_of)


def _bytes(tensor: Tensor) -> Bytes:
    return tensor.detach().view(-1).view(torch.uint8).numpy()
