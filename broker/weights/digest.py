"""A digest of the weights that is cheap enough to take of every version: sums on the bucket's own device, hashed small.

A bucket's bytes are read as 64-bit integers laid out in tiles of rows and columns. The sum of each row and of each
column, modulo 2**64, says how much stands where: changing one element changes its row's sum; exchanging two elements
changes two rows' sums, or, within one row, two columns' sums (within one word, that row's). These sums, a few
thousandths of the data, and the rest that fills no tile row are then hashed together with the lengths. It finds faults,
not forgeries: four elements changed by cancelling amounts at the corners of a rectangle go unseen, which no lost,
repeated, moved or flipped data looks like.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

ROW_WORDS: Final = 256  # 64-bit words of a row
ROW_BYTES: Final = 8 * ROW_WORDS
TILE_ROWS: Final = 1024  # rows whose columns are summed together: 2 MiB, which a core's cache holds for the second pass


class BucketDigest:
    """Digest of one bucket, taken in as many parts as its bytes come in.

    Args:
        bucket: uint8, shape (n,), contiguous, on any device, starting on a multiple of 8 bytes.
    """

    def __init__(self, bucket: Tensor) -> None:
        self._num_rows = bucket.numel() // ROW_BYTES
        self._bucket = bucket
        self._body = bucket[: self._num_rows * ROW_BYTES].view(torch.int64).view(self._num_rows, ROW_WORDS)
        num_tiles = -(-self._num_rows // TILE_ROWS)
        self._rows = torch.empty(self._num_rows, dtype=torch.int64, device=bucket.device)
        self._columns = torch.empty((num_tiles, ROW_WORDS), dtype=torch.int64, device=bucket.device)
        self._done = 0  # tiles

    def add(self, upto: int) -> None:
        """Take in all tiles that end at this byte or below."""
        if not self._bucket.is_cpu:
            self._add_together(upto)
        while (first := self._done * TILE_ROWS) < self._num_rows and (
            last := min(first + TILE_ROWS, self._num_rows)
        ) * ROW_BYTES <= upto:
            tile = self._body[first:last]
            torch.sum(tile, 1, out=self._rows[first:last])
            torch.sum(tile, 0, out=self._columns[self._done])
            self._done += 1

    def _add_together(self, upto: int) -> None:
        """All but a shorter last one in two sums, for each is a call of its own on a GPU; on a CPU one by one stays in
        the caches.
        """
        last = min(upto // (TILE_ROWS * ROW_BYTES), self._num_rows // TILE_ROWS)
        if last > self._done:
            rows = slice(self._done * TILE_ROWS, last * TILE_ROWS)
            torch.sum(self._body[rows], 1, out=self._rows[rows])
            torch.sum(self._body[rows].view(-1, TILE_ROWS, ROW_WORDS), 1, out=self._columns[self._done : last])
            self._done = last

    def finish(self) -> bytes:
        """All bytes are there: the digest, 16 bytes."""
        self.add(self._bucket.numel())
        rest = self._bucket[self._num_rows * ROW_BYTES :]
        hasher = hashlib.blake2b(self._bucket.numel().to_bytes(8, "little"), digest_size=16)
        for part in (self._rows, self._columns.view(-1), rest):
            hasher.update(part.cpu().numpy().tobytes())
        return hasher.digest()


def digest_bucket(bucket: Tensor) -> bytes:
    """Digest of one bucket that is whole, 16 bytes; see ``BucketDigest``."""
    return BucketDigest(bucket).finish()


def combine(bucket_digests: Sequence[bytes]) -> str:
    """Hex digest over all buckets in order, 32 characters."""
    hasher = hashlib.blake2b(len(bucket_digests).to_bytes(8, "little"), digest_size=16)
    for digest in bucket_digests:
        hasher.update(digest)
    return hasher.hexdigest()
