"""Writes safetensors files piece by piece.

The header of a part is that of ``torch.distributed.checkpoint.hf_storage``, and has the whole
tensors' shapes.
"""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import IO, Final

import torch
from torch import Tensor

from learner.backends.parts.part_file import CHUNK, PartFile, new_hash
from learner.backends.parts.slices import Slice

SHAPES: Final = "shapes"  # in a header's metadata: name to shape of the whole tensor
OFFSETS: Final = "DCP_SHARDING_INFO"  # torch's name: offsets of the slices in the whole
DTYPES: Final = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
CODES: Final = {dtype: code for code, dtype in DTYPES.items()}


def write_part(path: Path, slices: Sequence[Slice]) -> PartFile:
    """Write slices in host memory, flat or blocks, and sync; a few megabytes are held in addition.

    Raises:
        OSError: if the file cannot be written.
    """
    # aligned, as safetensors wants
    ordered = sorted(slices, key=lambda one: (-one.tensor.itemsize, one.name))
    shapes = {one.name: list(one.shape) for one in ordered}
    offsets = {one.name: {"saved_offsets": _offsets_of(one)} for one in ordered}
    about = {SHAPES: json.dumps(shapes), OFFSETS: json.dumps(offsets), "DCP_VERSION": "1.0"}
    entries = [(one.name, one.tensor.dtype, list(one.tensor.shape)) for one in ordered]
    hasher = new_hash()
    size = 0
    with path.open("wb") as file:
        data = (chunk for one in ordered for chunk in pieces(one.tensor))
        for chunk in chain([memoryview(header(entries, about))], data):
            hasher.update(chunk)
            size += file.write(chunk)
        _sync_file(file)
    return PartFile(str(path), size, hasher.hexdigest())


def _offsets_of(piece: Slice) -> list[int]:
    return list(divmod(piece.start, piece.shape[1])) if piece.block else [piece.start]


def header(entries: Sequence[tuple[str, torch.dtype, list[int]]], about: dict[str, str]) -> bytes:
    """Return the start of a safetensors file with tensors of these names, dtypes and shapes, one
    after the other.
    """
    fields: dict[str, object] = {"__metadata__": {"format": "pt"} | about}
    end = 0
    for name, dtype, shape in entries:
        start = end
        end = end + torch.Size(shape).numel() * dtype.itemsize
        fields[name] = {"dtype": CODES[dtype], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def pieces(tensor: Tensor) -> Iterator[memoryview]:
    """Yield the bytes of a contiguous tensor in host memory."""
    flat = tensor.reshape(-1)
    data = bytes_of(flat)
    for start in range(0, len(data), CHUNK):
        yield data[start : start + CHUNK]


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU, which must outlive it.

    An array of numpy would keep torch from ever resizing that memory, as moving it off the device
    does.
    """
    if not tensor.nbytes:
        return memoryview(b"")
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def _sync_file(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())
