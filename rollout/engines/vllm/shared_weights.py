"""Keeps a vLLM engine's weights in shared memory, written by the server and mapped by every worker.

AsyncLLM has its model in separate processes, and vLLM would pickle tensors sent to them. Only a
path and a table of names, dtypes, shapes and offsets are sent, as plain values in vLLM's own
MessagePack. Every worker reads the same pages; a tensor-parallel one copies only its shard. The
memory is a memfd: without a name in a file system it is not limited by a /dev/shm of 64 MiB, and
nothing remains when processes are killed.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from typing import Final

import torch

from broker.errors import UserError

ALIGN_BYTES: Final = 64
OWNER: Final = "RLEARNER_VLLM_OWNER"  # environment variable: process id of the workers' server

# name, dtype without "torch.", shape, offset in bytes
Layout = list[tuple[str, str, list[int], int]]


class SharedWeights:
    """A copy of named tensors in one shared buffer.

    Attributes:
        tensors: views into the buffer, by name.
        layout: position of each tensor, for ``map_shared`` in another process.
        path: file that another process of the same user can open while this one is alive.

    Raises:
        UserError: if the machine does not have enough memory.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.layout: Layout = []
        offset = 0
        for name, tensor in tensors.items():
            self.layout.append(
                (name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), offset)
            )
            offset += -(-tensor.nbytes // ALIGN_BYTES) * ALIGN_BYTES
        self.size_bytes = max(offset, ALIGN_BYTES)
        self._fd = os.memfd_create("rlearner-weights")
        try:
            # fail now, not with a SIGBUS at the first write
            os.posix_fallocate(self._fd, 0, self.size_bytes)
        except OSError as error:
            os.close(self._fd)
            need = f"{self.size_bytes / 2**30:.1f} GiB of the machine's memory for a copy of the weights"
            raise UserError(f"engine vllm needs {need}: {error.strerror}") from None
        self.path = f"/proc/{os.getpid()}/fd/{self._fd}"
        self.tensors = map_shared(self.path, self.size_bytes, self.layout)
        self.fill(tensors)

    @torch.no_grad()
    def fill(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy new values in; names and shapes must fit."""
        for name, tensor in self.tensors.items():
            new = tensors[name]
            # a tensor that no adapter changes is the same one
            if new.data_ptr() != tensor.data_ptr():
                tensor.copy_(new)

    def close(self) -> None:
        """Prevent new mappings; the last view frees the memory."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def map_shared(path: str, size_bytes: int, layout: Layout) -> dict[str, torch.Tensor]:
    """Return views of the tensors in a buffer that this or another process has created."""
    fd = os.open(path, os.O_RDWR)
    try:
        buffer = torch.frombuffer(mmap.mmap(fd, size_bytes), dtype=torch.uint8)
    finally:
        os.close(fd)
    views: dict[str, torch.Tensor] = {}
    for name, dtype_name, shape, offset in layout:
        dtype: torch.dtype = getattr(torch, dtype_name)
        length = torch.Size(shape).numel() * dtype.itemsize
        views[name] = buffer[offset : offset + length].view(dtype).view(shape)
    return views
