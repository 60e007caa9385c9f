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

# In a header's metadata: name to shape of the whole tensor.
SHAPES: Final = "shapes"
# torch's name: offsets of the slices in the whole tensors.
OFFSETS: Final = "DCP_SHARDING_INFO"
DTYPES: Final = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
CODES: Final = {dtype: code for code, dtype in DTYPES.items()}


def write_part(path: Path, slices: Sequence[Slice]) -> PartFile:
    """Write and sync slices in host memory; a few megabytes are held in addition.

    Raises:
        OSError: if the file cannot be written.
    """
    # The largest items come first, so that all are aligned, as safetensors wants.
    ordered = sorted(slices, key=lambda piece: (-piece.tensor.itemsize, piece.name))
    shapes = {piece.name: list(piece.shape) for piece in ordered}
    offsets = {piece.name: {"saved_offsets": _offsets_of(piece)} for piece in ordered}
    about = {SHAPES: json.dumps(shapes), OFFSETS: json.dumps(offsets), "DCP_VERSION": "1.0"}
    entries = [(piece.name, piece.tensor.dtype, list(piece.tensor.shape)) for piece in ordered]
    hasher = new_hash()
    size = 0
    with path.open("wb") as file:
        data = (chunk for piece in ordered for chunk in iter_bytes(piece.tensor))
        for chunk in chain([memoryview(encode_header(entries, about))], data):
            hasher.update(chunk)
            size += file.write(chunk)
        _sync_file(file)
    return PartFile(str(path), size, hasher.hexdigest())


def _offsets_of(piece: Slice) -> list[int]:
    if piece.block:
        return list(divmod(piece.start, piece.shape[1]))
    return [piece.start]


def encode_header(
    entries: Sequence[tuple[str, torch.dtype, list[int]]], about: dict[str, str]
) -> bytes:
    """Return the start of a safetensors file with tensors of these names, dtypes and shapes."""
    fields: dict[str, object] = {"__metadata__": {"format": "pt"} | about}
    end = 0
    for name, dtype, shape in entries:
        start = end
        end = end + torch.Size(shape).numel() * dtype.itemsize
        fields[name] = {"dtype": CODES[dtype], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def iter_bytes(tensor: Tensor) -> Iterator[memoryview]:
    """Yield the bytes of a contiguous tensor in host memory."""
    flat = tensor.reshape(-1)
    data = bytes_of(flat)
    for start in range(0, len(data), CHUNK):
        yield data[start : start + CHUNK]


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU, which must outlive it."""
    # A numpy array would keep torch from resizing that memory ever after, as an offload does.
    if not tensor.nbytes:
        return memoryview(b"")
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def _sync_file(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())
