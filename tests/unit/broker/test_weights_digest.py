"""Whatever goes wrong with bytes on their way changes the digest."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from broker.weights import digest as module
from broker.weights.digest import (
    ROW_BYTES,
    ROW_WORDS,
    TILE_ROWS,
    BucketDigest,
    combine,
    digest_bucket,
)

# from less than a row to more than a tile, with and without a rest
SIZES = [1, 64, ROW_BYTES, ROW_BYTES + 7, 9 * ROW_BYTES, (TILE_ROWS + 3) * ROW_BYTES + 40]


def random_bucket(size: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(
        0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )


BUCKETS = {size: random_bucket(size) for size in SIZES}


def test_equal_bytes_have_equal_digests_and_16_bytes_of_it() -> None:
    for bucket in BUCKETS.values():
        assert digest_bucket(bucket) == digest_bucket(bucket.clone())
        assert len(digest_bucket(bucket)) == 16
    assert len(combine([digest_bucket(bucket) for bucket in BUCKETS.values()])) == 32


def test_row_and_column_sums_are_those_of_the_definition() -> None:
    """Against sums in Python's own unbounded integers."""
    bucket = random_bucket(3 * ROW_BYTES + 5)
    words = bucket[: 3 * ROW_BYTES].view(torch.int64).tolist()
    rows = [sum(words[i * ROW_WORDS : (i + 1) * ROW_WORDS]) for i in range(3)]
    columns = [sum(words[j::ROW_WORDS]) for j in range(ROW_WORDS)]
    hasher = module.hashlib.blake2b((3 * ROW_BYTES + 5).to_bytes(8, "little"), digest_size=16)
    for value in rows + columns:
        hasher.update((value % 2**64).to_bytes(8, "little"))
    hasher.update(bytes(bucket[3 * ROW_BYTES :].tolist()))
    assert digest_bucket(bucket) == hasher.digest()


@given(st.sampled_from(SIZES), st.data())
@settings(max_examples=200, deadline=None)
def test_any_flipped_bit_changes_it(size: int, data: st.DataObject) -> None:
    bucket = BUCKETS[size].clone()
    bucket[data.draw(st.integers(0, size - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert digest_bucket(bucket) != digest_bucket(BUCKETS[size])


@given(
    st.sampled_from(SIZES),
    st.sampled_from([torch.uint8, torch.bfloat16, torch.float32, torch.float64]),
    st.data(),
)
@settings(max_examples=200, deadline=None)
def test_any_two_swapped_elements_change_it(
    size: int, dtype: torch.dtype, data: st.DataObject
) -> None:
    usable = size // dtype.itemsize * dtype.itemsize
    assume(usable >= 2 * dtype.itemsize)
    bucket = BUCKETS[size].clone()
    elements = (
        bucket[:usable]
        .view(dtype)
        .view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize])
    )
    first, second = (
        data.draw(st.integers(0, len(elements) - 1)),
        data.draw(st.integers(0, len(elements) - 1)),
    )
    assume(elements[first] != elements[second])
    elements[[first, second]] = elements[[second, first]]
    assert digest_bucket(bucket) != digest_bucket(BUCKETS[size])


@given(st.integers(0, 8), st.integers(0, 8))
@settings(deadline=None)
def test_neighbours_that_differ_in_the_sign_only(first: int, second: int) -> None:
    """A linear sum modulo 2**64 with even weight differences would miss this swap."""
    assume(first != second)
    bucket = torch.zeros(9 * ROW_BYTES, dtype=torch.uint8)
    values = bucket.view(torch.float32)
    values[2 * first + 1] = -0.0
    swapped = torch.zeros_like(bucket)
    swapped.view(torch.float32)[2 * second + 1] = -0.0
    assert digest_bucket(bucket) != digest_bucket(swapped)


@given(st.permutations(range(5)))
@settings(deadline=None)
def test_any_other_order_of_buckets_changes_it(order: list[int]) -> None:
    digests = [digest_bucket(random_bucket(4096, seed)) for seed in range(5)]
    assert (combine([digests[index] for index in order]) == combine(digests)) == (
        order == sorted(order)
    )


def test_lost_repeated_and_empty_data_change_it() -> None:
    zeros = torch.zeros(9 * ROW_BYTES, dtype=torch.uint8)
    assert digest_bucket(zeros) != digest_bucket(zeros[:-ROW_BYTES]) != digest_bucket(zeros[:-8])
    whole = random_bucket(9 * ROW_BYTES)
    shifted = torch.cat([whole[ROW_BYTES:], whole[:ROW_BYTES]])
    half_missing = whole.clone()
    half_missing[len(whole) // 2 :] = 0
    stale_half = torch.cat(
        [whole[: len(whole) // 2], random_bucket(9 * ROW_BYTES, 1)[len(whole) // 2 :]]
    )
    assert (
        len({digest_bucket(bucket) for bucket in (whole, shifted, half_missing, stale_half)}) == 4
    )
    one = digest_bucket(whole)
    assert len({combine([]), combine([one]), combine([one, one])}) == 3


@given(st.sampled_from(SIZES), st.lists(st.integers(0, max(SIZES) + 9), max_size=6))
@settings(deadline=None)
def test_taken_in_parts_it_is_the_same(size: int, cuts: list[int]) -> None:
    digest = BucketDigest(BUCKETS[size])
    for cut in cuts:  # rising or not, beyond the end or not
        digest.add(cut)
    assert digest.finish() == digest_bucket(BUCKETS[size])


class AsOnAGpu(BucketDigest):
    """Tiles are taken in together where there are several."""

    def add(self, upto: int) -> None:
        self._add_together(upto)
        super().add(upto)


@pytest.mark.parametrize("kind", [BucketDigest, AsOnAGpu])
@pytest.mark.parametrize("rows", [0, 3, TILE_ROWS, 3 * TILE_ROWS, 3 * TILE_ROWS + 5])
def test_tiles_taken_in_together_come_to_the_same(kind: type[BucketDigest], rows: int) -> None:
    bucket = random_bucket(rows * ROW_BYTES + 9)
    digest = kind(bucket)
    digest.add(2 * TILE_ROWS * ROW_BYTES + 8)
    assert digest.finish() == digest_bucket(bucket)


@pytest.mark.parametrize("kind", [BucketDigest, AsOnAGpu])
def test_parts_are_not_read_before_they_are_there(kind: type[BucketDigest]) -> None:
    tile = TILE_ROWS * ROW_BYTES
    bucket = torch.zeros(2 * tile + 40, dtype=torch.uint8)
    digest, whole = kind(bucket), random_bucket(2 * tile + 40)
    for upto in (100, tile, tile + ROW_BYTES, 2 * tile):
        bucket[:upto] = whole[:upto]
        digest.add(upto)
    bucket[:] = whole
    assert digest.finish() == digest_bucket(whole)
