"""A device whose memory is host memory, with the manners of a GPU's: units that a process may not
see, handles that open in other processes alone, copies that are there only once they were waited
for."""

from __future__ import annotations

import errno
import mmap
import os
import secrets
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch
from torch import Tensor

from broker.weights.memory.devices import MemoryCard, SharedDevice

UNITS = {name: name.encode().ljust(16, b"-") for name in ("left", "right")}


class Memfd(SharedDevice):
    """One unit.

    Args:
        unit: the one whose memory is lent.
        visible: those that this process sees.
        own: whether what this process lends opens in it, too.
    """

    kind = "memfd"

    def __init__(
        self, unit: str = "left", visible: Collection[str] = tuple(UNITS), *, own: bool = False
    ) -> None:
        self._unit, self._visible = UNITS[unit], {UNITS[name] for name in visible}
        self._queue = ThreadPoolExecutor(1, "device")
        self._reading, self._own = False, own

    def lend(self, size_bytes: int) -> tuple[Tensor, MemoryCard]:
        name = f"rlearner-device-{secrets.token_hex(4)}"
        file = os.memfd_create(name)  # open until this process ends
        os.ftruncate(file, size_bytes)
        lent = torch.frombuffer(mmap.mmap(file, size_bytes), dtype=torch.uint8)
        return lent, MemoryCard(self.kind, self._unit, size_bytes, f"{os.getpid()}/{file}".encode())

    def open(self, card: MemoryCard) -> Tensor:
        if card.unit not in self._visible:
            raise OSError(errno.ENODEV, f"unit {card.unit.decode()} is hidden from this process")
        pid, number = card.handle.decode().split("/")
        if int(pid) == os.getpid() and not self._own:
            raise OSError(errno.EINVAL, "a handle opens in another process")
        file = os.open(f"/proc/{pid}/fd/{number}", os.O_RDONLY)
        try:  # private: what the owner writes is seen, and nobody can write it here
            memory = mmap.mmap(
                file, card.size_bytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE
            )
        finally:
            os.close(file)
        return torch.frombuffer(memory, dtype=torch.uint8)

    @contextmanager
    def reading(self) -> Iterator[None]:
        self._reading = True
        try:
            yield
        finally:
            self._reading = False

    def copy(self, target: Tensor, source: Tensor) -> None:
        assert self._reading, "a copy outside of a reading waits for whatever others do"
        self._queue.submit(target.copy_, source).result()
