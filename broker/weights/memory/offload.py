"""Moves tensors off their device and back in place, while another process uses the device.

Storages are emptied and filled again, so tensors that share memory still do, and everything that
refers to a tensor stays valid; only addresses change. From a GPU the bytes go to host memory, from
the CPU to a file.
"""

from __future__ import annotations

import ctypes
import os
import sys
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from typing import IO, Final

import torch
from torch import Tensor, UntypedStorage

PIECE_BYTES: Final = 64 << 20  # read or written at a time


class OffloadedMemory:
    """The memory of some tensors, off the device between ``release`` and ``restore``.

    Args:
        folder: where the file is created, which has no name and ends with the process; None: the
            folder for temporary files.
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        self._folder = folder
        self._storages: list[UntypedStorage] = []
        # size and copy of each; None: the next bytes of the file
        self._saved: list[tuple[int, Tensor | None]] = []
        self._file: IO[bytes] | None = None
        # pinned memory of the last time, by size: allocating it takes long
        self._spare: dict[int, list[Tensor]] = {}

    def release(self, tensors: Iterable[Tensor]) -> int:
        """Empty the tensors and return the bytes that this freed; until ``restore`` none of them
        may be read.

        Args:
            tensors: all that share their memory, as some memory has to be replaced, see
                ``_emptied``.

        Raises:
            OSError: if the file cannot be written; the tensors are as before then.
        """
        groups = _by_memory(tensors)
        freed = 0
        try:
            for shared in groups:
                self._save(shared[0].untyped_storage())
        except BaseException:
            self._forget()
            raise
        for index, shared in enumerate(groups):
            freed += shared[0].untyped_storage().nbytes()
            self._storages[index] = _emptied(shared)
        return_freed_memory()
        return freed

    def restore(self) -> None:
        """Fill the tensors again, with the same bytes."""
        if self._file is not None:
            self._file.seek(0)
        for storage, (size, host_copy) in zip(self._storages, self._saved, strict=True):
            storage.resize_(size)
            if host_copy is None:
                self._fill(storage)
            else:
                _bytes(storage).copy_(host_copy, non_blocking=True)
                self._spare.setdefault(size, []).append(host_copy)
        if any(host_copy is not None for _, host_copy in self._saved):
            torch.cuda.synchronize()
        self._forget()

    def _save(self, storage: UntypedStorage) -> None:
        """Copy a storage to host memory or to the end of the file."""
        size = storage.nbytes()
        self._storages.append(storage)
        if storage.device.type == "cuda":
            spare = self._spare.get(size)
            host_copy = (
                spare.pop() if spare else torch.empty(size, dtype=torch.uint8, pin_memory=True)
            )
            self._saved.append((size, host_copy.copy_(_bytes(storage))))
            return
        # raw bytes: a safetensors file would be built in memory first, as large as the tensors
        if self._file is None:
            self._file = tempfile.TemporaryFile(dir=self._folder, buffering=0)  # noqa: SIM115 - closed by _forget
        remainder = _view(storage)
        while remainder:
            remainder = remainder[self._file.write(remainder[:PIECE_BYTES]) :]
        self._saved.append((size, None))

    def _fill(self, storage: UntypedStorage) -> None:
        assert self._file is not None
        view = _view(storage)
        while view:
            count = self._file.readinto(view[:PIECE_BYTES])  # type: ignore[attr-defined]
            if not count:
                raise OSError("the file of offloaded tensors ended early")
            view = view[count:]

    def _forget(self) -> None:
        self._storages = []
        self._saved = []
        if self._file is not None:
            self._file.close()
            self._file = None


def return_freed_memory() -> None:
    """Give memory that was freed back to the system, and to other processes on a GPU."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
    if sys.platform.startswith("linux"):
        with suppress(AttributeError):  # musl has no such function
            ctypes.CDLL(None).malloc_trim(0)


def _by_memory(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Group tensors by the memory that they share; leave out those without any."""
    by_address: dict[int, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.device.type != "meta" and tensor.untyped_storage().nbytes():
            by_address.setdefault(tensor.untyped_storage().data_ptr(), []).append(tensor)
    return list(by_address.values())


@torch.no_grad()
def _emptied(shared: list[Tensor]) -> UntypedStorage:
    """Free the memory that tensors share and return their empty storage.

    Torch does not resize a storage that is mapped from a file or was shown as a numpy array: the
    tensors get another.
    """
    storage = shared[0].untyped_storage()
    if not storage.resizable():
        storage = UntypedStorage(0, device=storage.device)  # type: ignore[no-untyped-call]
        for tensor in shared:
            view = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            tensor.data = view.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
    storage.resize_(0)
    return storage


def _bytes(storage: UntypedStorage) -> Tensor:
    """Return the bytes of a storage as a tensor that shares its memory."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _view(storage: UntypedStorage) -> memoryview:
    """Return the memory of a storage on the CPU; torch never empties one that was once shown as a
    numpy array.
    """
    size = storage.nbytes()
    return memoryview((ctypes.c_ubyte * size).from_address(storage.data_ptr())).cast("B")
