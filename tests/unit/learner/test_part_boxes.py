"""Blocks of columns and ranges of elements in files: any division of a tensor reads what any other
wrote.
"""

from __future__ import annotations

import json
import tempfile
from math import prod
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

from learner.backends.parts import stored as stored_module
from learner.backends.parts.boxes import Box, boxes_between, first_gap, stored_boxes
from learner.backends.parts.part_file import DamagedFileError
from learner.backends.parts.slices import Slice, copy_slices
from learner.backends.parts.stored import StoredTensors
from learner.backends.parts.writing import write_part

Divided = list[Slice]


def columns(tensor: torch.Tensor, tp: int, copies: int) -> Divided:
    """What the ranks of ``copies`` models hold that divide a matrix's columns."""
    size, shape = tensor.shape[1] // tp, tuple(tensor.shape)
    shares = [
        Slice("w", shape, share * size, tensor[:, share * size : (share + 1) * size])
        for share in range(tp)
    ]
    return [
        Slice(one.name, shape, one.start, one.tensor, among=(copy, copies), block=True)
        for copy in range(copies)
        for one in shares
    ]


def rows(tensor: torch.Tensor, tp: int, copies: int) -> Divided:
    flat, shape = tensor.reshape(-1), tuple(tensor.shape)
    ends = [len(flat) * share // tp for share in range(tp + 1)]
    return [
        Slice("w", shape, ends[share], flat[ends[share] : ends[share + 1]], among=(copy, copies))
        for copy in range(copies)
        for share in range(tp)
    ]


def test_a_range_is_at_most_three_boxes_by_hand() -> None:
    assert list(boxes_between(2, 13, 4)) == [Box(0, 1, 2, 4), Box(1, 3, 0, 4), Box(3, 4, 0, 1)]
    assert list(boxes_between(5, 7, 4)) == [Box(1, 2, 1, 3)]
    assert list(boxes_between(3, 3, 4)) == []


def test_blocks_are_cut_into_rows_or_parts_of_one_row() -> None:
    assert list(Box(0, 3, 2, 4).cut(4)) == [Box(0, 2, 2, 4), Box(2, 3, 2, 4)]
    assert list(Box(0, 1, 0, 5).cut(2)) == [Box(0, 1, 0, 2), Box(0, 1, 2, 4), Box(0, 1, 4, 5)]


def test_the_first_gap_by_hand() -> None:
    assert first_gap([Box(0, 3, 0, 2), Box(0, 3, 2, 4)], 3, 4) is None
    assert first_gap([Box(0, 3, 0, 2), Box(0, 1, 2, 4), Box(2, 3, 2, 4)], 3, 4) == 6
    assert first_gap([Box(0, 2, 0, 4)], 3, 4) == 8
    # overlapping
    assert (
        first_gap([Box(0, 2, 0, 3), Box(1, 3, 1, 4), Box(0, 1, 3, 4), Box(2, 3, 0, 2)], 3, 4)
        is None
    )


def test_what_is_not_in_a_tensor_is_refused() -> None:
    for shape, offsets in (([2, 3], [1, 2]), ([4], [9]), ([2, 2], [-1, 0]), ([2, 2], [0, 0, 0])):
        with pytest.raises(ValueError, match="a slice of shape"):
            stored_boxes([3, 4], shape, offsets)


@given(
    size=st.tuples(st.integers(1, 5), st.sampled_from([4, 8, 12])),
    written=st.tuples(st.booleans(), st.sampled_from([1, 2, 4]), st.integers(1, 3)),
    wanted=st.tuples(st.booleans(), st.sampled_from([1, 2, 4])),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    chunk=st.sampled_from([4, 12, 8 << 20]),
)
def test_any_division_reads_any_other(
    size: tuple[int, int],
    written: tuple[bool, int, int],
    wanted: tuple[bool, int],
    dtype: torch.dtype,
    chunk: int,
) -> None:
    tensor = torch.arange(float(prod(size))).view(size)
    held = (columns if written[0] else rows)(tensor, *written[1:])
    own, stored_module.CHUNK = stored_module.CHUNK, chunk  # type: ignore[misc]
    try:
        with tempfile.TemporaryDirectory() as folder:
            files = [Path(folder) / f"{index}" for index in range(len(held))]
            parts = [
                write_part(file, copy_slices([one], 0, 1))
                for file, one in zip(files, held, strict=True)
            ]
            stored = StoredTensors(part.path for part in parts)
            assert torch.equal(stored["w"], tensor)
            assert torch.cat(
                [piece.clone() for _, piece in stored.chunks("w", 0, tensor.numel())]
            ).tolist() == (tensor.flatten().tolist())
            into = torch.full(size, -1.0, dtype=dtype)
            stored.load((columns if wanted[0] else rows)(into, wanted[1], 1))
            if wanted[0] or into.is_contiguous():
                assert torch.equal(into, tensor.to(dtype))
    finally:
        stored_module.CHUNK = own  # type: ignore[misc]


def test_a_block_too_few_is_named_by_its_tensor(tmp_path: Path) -> None:
    first, _ = columns(torch.arange(12.0).view(3, 4), 2, 1)
    part = write_part(tmp_path / "a", copy_slices([first], 0, 1))
    with pytest.raises(DamagedFileError, match=r"element 2 of 12 of w is in none of its parts"):
        StoredTensors([part.path])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_reads_blocks(tmp_path: Path) -> None:
    tensor = torch.arange(12.0).view(3, 4)
    for index, one in enumerate(columns(tensor, 2, 1)):
        write_part(tmp_path / f"{index}.safetensors", copy_slices([one], 0, 1))
    data = (tmp_path / "1.safetensors").read_bytes()
    about = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
    assert json.loads(about["DCP_SHARDING_INFO"]) == {"w": {"saved_offsets": [0, 2]}}
    into = {"w": torch.empty(3, 4)}
    torch.distributed.checkpoint.load(
        into, storage_reader=HuggingFaceStorageReader(str(tmp_path)), no_dist=True
    )
    assert torch.equal(into["w"], tensor)
