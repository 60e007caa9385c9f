"""A digest of the weights that is cheap enough to take of every version: sums on the bucket's own device, hashed small.

A bucket's bytes are read as 64-bit integers laid out in tiles of rows and columns. The sum of each row and of each
column, modulo 2**64, says how much stands where: changing one element changes its row's sum; exchanging two elements changes
two rows' sums, or, within one row, two columns' sums (within one word, that row's). These sums, a few thousandths of the data, and the
rest that fills no tile row are then hashed together with the lengths. It finds faults, not forgeries: four elements changed by
cancelling amounts at the corners of a rectangle go unseen, which no lost, repeated, moved or flipped data looks like.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor

ROW_WORDS: Final = 256  # 64-bit words of a row
TILE_ROWS: Final = 1024  # rows whose columns are summed together: 2 MiB, which a core's cache holds for the second pass


def digest_bucket(bucket: Tensor) -> bytes:
    """Digest of one bucket, 16 bytes.

    Args:
        bucket: uint8, shape (n,), contiguous, on any device, starting on a multiple of 8 bytes.
    """
    num_rows = bucket.numel() // (8 * ROW_WORDS)
    body = bucket[: num_rows * 8 * ROW_WORDS].view(torch.int64).view(num_rows, ROW_WORDS)
    num_tiles = -(-num_rows // TILE_ROWS)
    rows = torch.empty(num_rows, dtype=torch.int64, device=bucket.device)
    columns = torch.empty((num_tiles, ROW_WORDS), dtype=torch.int64, device=bucket.device)
    for tile in range(num_tiles):
        span = slice(tile * TILE_ROWS, min((tile + 1) * TILE_ROWS, num_rows))
        torch.sum(body[span], 1, out=rows[span])
        torch.sum(body[span], 0, out=columns[tile])
    rest = bucket[num_rows * 8 * ROW_WORDS :]
    hasher = hashlib.blake2b(bucket.numel().to_bytes(8, "little"), digest_size=16)
    for part in (rows, columns.view(-1), rest):
        hasher.update(part.cpu().numpy().tobytes())
    return hasher.digest()


def combine(bucket_digests: Sequence[bytes]) -> str:
    """Hex digest over all buckets in order, 32 characters."""
    hasher = hashlib.blake2b(len(bucket_digests).to_bytes(8, "little"), digest_size=16)
    for digest in bucket_digests:
        hasher.update(digest)
    return hasher.hexdigest()


def digest_all(num_buckets: int, bucket: Callable[[int], Tensor]) -> str:
    """Hex digest over ``bucket(0) … bucket(num_buckets - 1)``."""
    return combine([digest_bucket(bucket(index)) for index in range(num_buckets)])
