"""Reads tensors from safetensors files by ranges of elements, without holding more than is asked for.

Files are read, not mapped: what is not asked for is never in this process's memory.
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

from learner.backends.parts.part_file import CHUNK, DamagedFileError
from learner.backends.parts.slices import Slice
from learner.backends.parts.writing import DTYPES, OFFSETS, SHAPES, bytes_of

_MAX_HEADER: Final = 100_000_000  # bytes, the format's limit


@dataclass(frozen=True)
class _Run:
    """Elements ``start`` to ``stop`` of a tensor, at ``offset`` bytes of a file."""

    start: int
    stop: int
    file: Path
    offset: int

    def place(self, at: int, dtype: torch.dtype) -> int:
        """Return where an element of the tensor is in the file."""
        return self.offset + (at - self.start) * dtype.itemsize


@dataclass
class StoredTensor:
    """Where a tensor's elements are."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    runs: list[_Run] = field(default_factory=list)

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def between(self, start: int, stop: int) -> Iterator[tuple[_Run, int, int]]:
        """Yield which elements of a range are in which run, in order, each once."""
        for run in sorted(self.runs, key=lambda run: run.start):
            if run.start < stop and run.stop > start:
                yield run, start, min(run.stop, stop)
                start = min(run.stop, stop)

    def gap(self) -> str:
        """Return which elements are missing, empty if none is."""
        at = 0
        for run in sorted(self.runs, key=lambda run: run.start):
            if run.start > at:
                break
            at = max(at, run.stop)
        return "" if at >= self.numel else f"element {at} of {self.numel}"


class StoredTensors(Mapping[str, Tensor]):
    """The tensors of some files by name; a whole one is read on each access.

    Args:
        files: parts of a checkpoint, or whole models in Hugging Face's format.

    Raises:
        DamagedFileError: if a file is missing, is not safetensors, or elements of a tensor are in no file.
    """

    def __init__(self, files: Iterable[str | Path]) -> None:
        self.entries: dict[str, StoredTensor] = {}
        for file in files:
            self._open(Path(file))
        for name, entry in self.entries.items():
            if gap := entry.gap():
                folder = entry.runs[0].file.parent
                raise DamagedFileError(f"{folder} is damaged: {gap} of {name} is in none of its parts")

    def __getitem__(self, name: str) -> Tensor:
        entry = self.entries[name]
        found = torch.empty(entry.shape, dtype=entry.dtype)
        self.read(name, 0, found)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __contains__(self, name: object) -> bool:
        return name in self.entries

    @torch.no_grad()
    def read(self, name: str, start: int, into: Tensor) -> None:
        """Fill a tensor of any shape, dtype and device with the elements from ``start`` on.

        Raises:
            DamagedFileError: if a file has become shorter or unreadable.
        """
        if not into.is_contiguous():
            held = torch.empty(into.shape, dtype=into.dtype, device=into.device)
            self.read(name, start, held)
            into.copy_(held)
            return
        flat, entry = into.detach().view(-1), self.entries[name]
        if flat.device.type != "cpu" or flat.dtype != entry.dtype:
            for at, piece in self.chunks(name, start, start + len(flat)):
                flat[at - start : at - start + len(piece)].copy_(piece)
            return
        for run, first, last in entry.between(start, start + len(flat)):
            with _opened(run.file) as descriptor:
                _fill(flat[first - start : last - start], descriptor, run.place(first, entry.dtype), run.file)

    def chunks(self, name: str, start: int, stop: int) -> Iterator[tuple[int, Tensor]]:
        """Yield neighbouring elements with the place of the first; each tensor is valid until the next."""
        entry = self.entries[name]
        buffer = torch.empty(min(CHUNK // entry.dtype.itemsize, max(0, stop - start)), dtype=entry.dtype)
        for run, first, last in entry.between(start, stop):
            with _opened(run.file) as descriptor:
                for at in range(first, last, len(buffer)):
                    piece = buffer[: min(len(buffer), last - at)]
                    _fill(piece, descriptor, run.place(at, entry.dtype), run.file)
                    yield at, piece

    def load(self, slices: Iterable[Slice]) -> None:
        """Fill slices; the names must be here."""
        for one in slices:
            self.read(one.name, one.start, one.tensor)

    def _open(self, file: Path) -> None:
        try:
            end, found = _header(file)
            about = found.pop("__metadata__", None) or {}
            shapes, offsets = (json.loads(about.get(key) or "{}") for key in (SHAPES, OFFSETS))
            for name, entry in found.items():
                dtype, shape = DTYPES[entry["dtype"]], tuple(int(length) for length in entry["shape"])
                begin, close = entry["data_offsets"]
                whole = tuple(int(length) for length in shapes.get(name, shape))
                start = int(offsets[name]["saved_offsets"][0]) if name in shapes else 0
                if not 0 <= begin <= close <= end.size - end.data or close - begin != prod(shape) * dtype.itemsize:
                    raise ValueError(f"{name} is not where the header says")
                stored = self.entries.setdefault(name, StoredTensor(dtype, whole))
                if (stored.dtype, stored.shape) != (dtype, whole):
                    raise ValueError(f"{name} has another shape or dtype than in another file")
                stored.runs.append(_Run(start, start + prod(shape), file, end.data + begin))
        except OSError as error:
            raise DamagedFileError(f"{file} cannot be read: {error.strerror}") from None
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError, OverflowError) as error:
            problem = " ".join(str(error).split())[:200] or type(error).__name__
            raise DamagedFileError(f"{file} cannot be read: not safetensors: {problem}") from None


@dataclass(frozen=True)
class _Extent:
    data: int  # where the tensors begin
    size: int  # bytes of the file


def _header(file: Path) -> tuple[_Extent, dict[str, Any]]:
    with file.open("rb") as opened:
        size = os.fstat(opened.fileno()).st_size
        length = int.from_bytes(opened.read(8), "little")
        if not 2 <= length <= min(_MAX_HEADER, size - 8):
            raise ValueError(f"a header of {length} bytes in a file of {size}")
        found = json.loads(opened.read(length))
    if not isinstance(found, dict):
        raise ValueError("the header is not a JSON object")
    return _Extent(8 + length, size), found


@contextmanager
def _opened(file: Path) -> Iterator[int]:
    """Yield a file's descriptor."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise DamagedFileError(f"{file} cannot be read: {error.strerror}") from None
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _fill(piece: Tensor, descriptor: int, offset: int, file: Path) -> None:
    data = bytes_of(piece)
    while data:
        try:
            done = os.preadv(descriptor, [data], offset)
        except OSError as error:
            raise DamagedFileError(f"{file} cannot be read: {error.strerror}") from None
        if not done:
            raise DamagedFileError(f"{file} is damaged: it ends too early")
        data, offset = data[done:], offset + done
