"""A digest of weights that is cheap enough for every version: sums on the bucket's device, of which
a hash is taken.

A bucket's bytes are read as 64-bit integers in tiles of rows and columns. The sums of each row and
each column, modulo 2**64, depend on the positions: changing an element changes its row's sum;
exchanging two elements changes two rows' sums or, within a row, two columns' sums. The sums (a few
thousandths of the data), the rest that fills no row of a tile and the lengths are hashed. It finds
faults, not forgeries: four changes that cancel out at the corners of a rectangle are missed, which
lost, repeated, moved or flipped data never produces.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

ROW_WORDS: Final = 256  # 64-bit words of a row
ROW_BYTES: Final = 8 * ROW_WORDS
# rows whose columns are summed together: 2 MiB stay in a core's cache for the second pass
TILE_ROWS: Final = 1024


class BucketDigest:
    """Digest of one bucket, computed incrementally as its bytes arrive.

    Args:
        bucket: uint8, shape (n,), contiguous, on any device, aligned to 8 bytes.
    """

    def __init__(self, bucket: Tensor) -> None:
        self._num_rows = bucket.numel() // ROW_BYTES
        self._bucket = bucket
        self._body = (
            bucket[: self._num_rows * ROW_BYTES].view(torch.int64).view(self._num_rows, ROW_WORDS)
        )
        num_tiles = -(-self._num_rows // TILE_ROWS)
        self._rows = torch.empty(self._num_rows, dtype=torch.int64, device=bucket.device)
        self._columns = torch.empty((num_tiles, ROW_WORDS), dtype=torch.int64, device=bucket.device)
        self._done = 0  # tiles

    def add(self, upto: int) -> None:
        """Add all tiles that end at or below this byte."""
        if not self._bucket.is_cpu:
            self._add_together(upto)
        while (first := self._done * TILE_ROWS) < self._num_rows:
            last = min(first + TILE_ROWS, self._num_rows)
            if last * ROW_BYTES > upto:
                break
            tile = self._body[first:last]
            torch.sum(tile, 1, out=self._rows[first:last])
            torch.sum(tile, 0, out=self._columns[self._done])
            self._done += 1

    def _add_together(self, upto: int) -> None:
        """Add all but a shorter last tile by two sums: few kernels on a GPU. On a CPU, tile by tile
        uses the caches.
        """
        last = min(upto // (TILE_ROWS * ROW_BYTES), self._num_rows // TILE_ROWS)
        if last > self._done:
            rows = slice(self._done * TILE_ROWS, last * TILE_ROWS)
            torch.sum(self._body[rows], 1, out=self._rows[rows])
            torch.sum(
                self._body[rows].view(-1, TILE_ROWS, ROW_WORDS),
                1,
                out=self._columns[self._done : last],
            )
            self._done = last

    def finish(self) -> bytes:
        """Return the digest, 16 bytes, once all bytes are there."""
        return digest_of_sums(self._bucket.numel(), self.sums())

    def sums(self) -> Tensor:
        """Return what is hashed, once all bytes are there: int64, shape (``num_sums(n)``,), on the
        CPU.

        It is additive: the sums of a bucket whose bytes lie in several buffers of its size, which
        are zero elsewhere, are the sums of those buffers' sums, modulo 2**64.
        """
        self.add(self._bucket.numel())
        tail_words = torch.zeros(num_rest_words(self._bucket.numel()) * 8, dtype=torch.uint8)
        tail = self._bucket[self._num_rows * ROW_BYTES :]
        tail_words[: tail.numel()] = tail.cpu()
        return torch.cat(
            [self._rows.cpu(), self._columns.view(-1).cpu(), tail_words.view(torch.int64)]
        )


def num_rest_words(num_bytes: int) -> int:
    """Return the 64-bit words of what fills no row of a bucket."""
    return -(-(num_bytes % ROW_BYTES) // 8)


def num_sums(num_bytes: int) -> int:
    """Return the length of ``BucketDigest.sums`` of a bucket."""
    num_rows = num_bytes // ROW_BYTES
    return num_rows + -(-num_rows // TILE_ROWS) * ROW_WORDS + num_rest_words(num_bytes)


def digest_of_sums(num_bytes: int, sums: Tensor) -> bytes:
    """Return the digest, 16 bytes, of a bucket with these ``BucketDigest.sums``."""
    body = len(sums) - num_rest_words(num_bytes)
    hasher = hashlib.blake2b(num_bytes.to_bytes(8, "little"), digest_size=16)
    hasher.update(sums[:body].numpy().tobytes())
    hasher.update(sums[body:].numpy().tobytes()[: num_bytes % ROW_BYTES])
    return hasher.digest()


def digest_bucket(bucket: Tensor) -> bytes:
    """Return the digest of a complete bucket, 16 bytes; see ``BucketDigest``."""
    return BucketDigest(bucket).finish()


def combine(bucket_digests: Sequence[bytes]) -> str:
    """Return the hex digest over all buckets in order, 32 characters."""
    hasher = hashlib.blake2b(len(bucket_digests).to_bytes(8, "little"), digest_size=16)
    for digest in bucket_digests:
        hasher.update(digest)
    return hasher.hexdigest()
