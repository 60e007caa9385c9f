"""Reads tensors from safetensors files by ranges of elements and by blocks.

Files are read, not mapped: this process never holds more than the caller asked for.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from learner.backends.parts.boxes import Box, boxes_between, first_gap, matrix_of, stored_boxes
from learner.backends.parts.part_file import CHUNK, DamagedFileError
from learner.backends.parts.slices import Slice
from learner.backends.parts.writing import DTYPES, OFFSETS, SHAPES, bytes_of

INDEX: Final = "model.safetensors.index.json"
_WHOLE: Final = "model.safetensors"
# Bytes, the format's own limit.
_MAX_HEADER: Final = 100_000_000


@dataclass(frozen=True)
class _Piece:
    """A box of a tensor, whose elements follow each other in a file from ``offset`` bytes on."""

    box: Box
    file: Path
    offset: int

    def read(self, area: Box, into: Tensor, dtype: torch.dtype) -> None:
        """Fill a matrix of any dtype and device with a box within this one."""
        with _open_file(self.file) as descriptor:
            for box in area.cut(CHUNK // dtype.itemsize):
                top = box.top - area.top
                left = box.left - area.left
                target = into[top : top + box.rows, left : left + box.columns]
                if target.device.type == "cpu" and target.dtype == dtype and target.is_contiguous():
                    self._fill(target, box, descriptor)
                else:
                    buffer = torch.empty(box.rows, box.columns, dtype=dtype)
                    self._fill(buffer, box, descriptor)
                    target.copy_(buffer)

    def _fill(self, into: Tensor, box: Box, descriptor: int) -> None:
        data = bytes_of(into)
        size = into.itemsize
        # Whole rows follow each other in the file, and need one read for all.
        at_once = box.rows if box.columns == self.box.columns else 1
        length = at_once * box.columns * size
        for index, row in enumerate(range(box.top, box.bottom, at_once)):
            place = (row - self.box.top) * self.box.columns + box.left - self.box.left
            _read_into(
                data[index * length : (index + 1) * length],
                descriptor,
                self.offset + place * size,
                self.file,
            )


@dataclass
class StoredTensor:
    """Where a tensor's elements are."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: list[_Piece] = field(default_factory=list)

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def read(self, box: Box, into: Tensor) -> None:
        """Fill a matrix with a box of the tensor's matrix."""
        for piece in self.pieces:
            if (part := piece.box.meet(box)) is not None:
                top = part.top - box.top
                left = part.left - box.left
                piece.read(
                    part, into[top : top + part.rows, left : left + part.columns], self.dtype
                )

    def gap(self) -> str:
        """Return which elements are missing, empty if none is."""
        if not self.numel:
            return ""
        element = first_gap((piece.box for piece in self.pieces), *matrix_of(self.shape))
        return "" if element is None else f"element {element} of {self.numel}"


class StoredTensors(Mapping[str, Tensor]):
    """The tensors of some files by name; a whole one is read on each access.

    Args:
        files: parts of a checkpoint, or whole models in Hugging Face's format.

    Raises:
        DamagedFileError: if a file is missing, is not safetensors, or elements of a tensor are in
            no file.
    """

    def __init__(self, files: Iterable[str | Path]) -> None:
        self.entries: dict[str, StoredTensor] = {}
        for file in files:
            self._open(Path(file))
        for name, entry in self.entries.items():
            if gap := entry.gap():
                folder = entry.pieces[0].file.parent
                raise DamagedFileError(
                    f"{folder} is damaged: {gap} of {name} is in none of its parts"
                )

    def __getitem__(self, name: str) -> Tensor:
        entry = self.entries[name]
        tensor = torch.empty(entry.shape, dtype=entry.dtype)
        self.read(name, 0, tensor)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __contains__(self, name: object) -> bool:
        return name in self.entries

    def below(self, prefix: str) -> StoredTensors:
        """Return the tensors whose names begin with a prefix, without it."""
        tensors = StoredTensors(())
        tensors.entries = {
            name.removeprefix(prefix): entry
            for name, entry in self.entries.items()
            if name.startswith(prefix)
        }
        return tensors

    @torch.no_grad()
    def read(self, name: str, start: int, into: Tensor) -> None:
        """Fill a tensor of any shape, dtype and device with the elements from ``start`` on.

        Raises:
            DamagedFileError: if a file has become shorter or unreadable.
        """
        if not into.is_contiguous():
            buffer = torch.empty(into.shape, dtype=into.dtype, device=into.device)
            self.read(name, start, buffer)
            into.copy_(buffer)
            return
        flat = into.detach().view(-1)
        entry = self.entries[name]
        at = 0
        for box in boxes_between(start, start + len(flat), max(1, matrix_of(entry.shape)[1])):
            entry.read(box, flat[at : at + box.numel].view(box.rows, box.columns))
            at += box.numel

    def chunks(self, name: str, start: int, stop: int) -> Iterator[tuple[int, Tensor]]:
        """Yield pieces of a tensor and their places; each piece is overwritten by the next."""
        dtype = self.entries[name].dtype
        buffer = torch.empty(min(CHUNK // dtype.itemsize, max(0, stop - start)), dtype=dtype)
        for at in range(start, stop, max(1, len(buffer))):
            piece = buffer[: min(len(buffer), stop - at)]
            self.read(name, at, piece)
            yield at, piece

    @torch.no_grad()
    def load(self, slices: Iterable[Slice]) -> None:
        """Fill slices; the names must be here."""
        for piece in slices:
            if piece.block:
                top, left = divmod(piece.start, piece.shape[1])
                rows, columns = piece.tensor.shape
                self.entries[piece.name].read(
                    Box(top, top + rows, left, left + columns), piece.tensor.detach()
                )
            else:
                self.read(piece.name, piece.start, piece.tensor)

    def _open(self, file: Path) -> None:
        try:
            extent, header = _read_header(file)
            about = header.pop("__metadata__", None) or {}
            shapes, offsets = (json.loads(about.get(key) or "{}") for key in (SHAPES, OFFSETS))
            for name, entry in header.items():
                dtype = DTYPES[entry["dtype"]]
                shape = tuple(int(length) for length in entry["shape"])
                begin, close = entry["data_offsets"]
                whole = tuple(int(length) for length in shapes.get(name, shape))
                if name in shapes:
                    place = [int(offset) for offset in offsets[name]["saved_offsets"]]
                else:
                    place = [0]
                if (
                    not 0 <= begin <= close <= extent.size - extent.data
                    or close - begin != prod(shape) * dtype.itemsize
                ):
                    raise ValueError(f"{name} is not where the header says")
                tensor = self.entries.setdefault(name, StoredTensor(dtype, whole))
                if (tensor.dtype, tensor.shape) != (dtype, whole):
                    raise ValueError(f"{name} has another shape or dtype than in another file")
                at = extent.data + begin
                for box in stored_boxes(whole, shape, place):
                    tensor.pieces.append(_Piece(box, file, at))
                    at += box.numel * dtype.itemsize
        except OSError as error:
            raise DamagedFileError(f"{file} cannot be read: {error.strerror}") from None
        except (
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
            IndexError,
            RecursionError,
            OverflowError,
        ) as error:
            problem = " ".join(str(error).split())[:200] or type(error).__name__
            raise DamagedFileError(f"{file} cannot be read: not safetensors: {problem}") from None


def weights_in_files(folder: Path) -> StoredTensors:
    """Return the weights of a model in Hugging Face format.

    Raises:
        DamagedFileError: if a file is missing or damaged.
    """
    if (folder / _WHOLE).is_file():
        return StoredTensors([folder / _WHOLE])
    index = folder / INDEX
    try:
        names: set[str] = set()
        if index.is_file():
            names = set(json.loads(index.read_text("utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise DamagedFileError(f"{index} cannot be read: {' '.join(str(error).split())}") from None
    return StoredTensors(
        [folder / str(name) for name in sorted(names)] or sorted(folder.glob("*.safetensors"))
    )


@dataclass(frozen=True)
class _Extent:
    data: int  # where the tensors begin
    size: int  # bytes of the file


def _read_header(file: Path) -> tuple[_Extent, dict[str, Any]]:
    with file.open("rb") as file_object:
        size = os.fstat(file_object.fileno()).st_size
        length = int.from_bytes(file_object.read(8), "little")
        if not 2 <= length <= min(_MAX_HEADER, size - 8):
            raise ValueError(f"a header of {length} bytes in a file of {size}")
        header = json.loads(file_object.read(length))
    if not isinstance(header, dict):
        raise ValueError("the header is not a JSON object")
    return _Extent(8 + length, size), header


@contextmanager
def _open_file(file: Path) -> Iterator[int]:
    """Yield a file's descriptor."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise DamagedFileError(f"{file} cannot be read: {error.strerror}") from None
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _read_into(data: memoryview, descriptor: int, offset: int, file: Path) -> None:
    while data:
        try:
            num_read = os.preadv(descriptor, [data], offset)
        except OSError as error:
            raise DamagedFileError(f"{file} cannot be read: {error.strerror}") from None
        if not num_read:
            raise DamagedFileError(f"{file} is damaged: it ends too early")
        data = data[num_read:]
        offset = offset + num_read
