"""Memory of a device, such as a GPU, that another process of this host can open: the staging buffers of a learner may
lie in it.

How far packing has come and which version lies there stays in host memory (broker.weights.memory.shared). What stands
there of the device's memory is a card: plain text of fixed form, so that nothing is unpickled, and readable only by
processes of the same user on the same host. The protocol around it is the same for every device;
``broker.weights.memory.cuda`` is the real one, the tests have one over host memory.
"""

from __future__ import annotations

import re
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Final, Protocol

from torch import Tensor

CARD: Final = re.compile(r"([a-z]{1,16})/([0-9a-f]{32})/([1-9]\d{0,17})/((?:[0-9a-f]{2}){1,512})")


@dataclass(frozen=True)
class MemoryCard:
    """What another process needs to find a piece of a device's memory.

    Attributes:
        kind: of device, its ``SharedDevice.kind``.
        unit: which one, 16 bytes that are the same for every process of the host: a GPU's UUID.
        size_bytes: of the whole piece.
        handle: what the driver calls it.
    """

    kind: str
    unit: bytes
    size_bytes: int
    handle: bytes

    @property
    def text(self) -> str:
        """As ``from_text`` reads it, ASCII."""
        return f"{self.kind}/{self.unit.hex()}/{self.size_bytes}/{self.handle.hex()}"

    @classmethod
    def from_text(cls, text: str) -> MemoryCard:
        """A card that another process wrote.

        Raises:
            ValueError: it is none.
        """
        if (found := CARD.fullmatch(text)) is None:
            raise ValueError(f"{text[:80]!r} is no card of a device's memory")
        return cls(found[1], bytes.fromhex(found[2]), int(found[3]), bytes.fromhex(found[4]))


class SharedDevice(Protocol):
    """One device as one process uses it. The learner lends, a server opens, reads and copies."""

    @property
    def kind(self) -> str:
        """Of the cards that it writes and reads."""
        ...

    def lend(self, size_bytes: int) -> tuple[Tensor, MemoryCard]:
        """Memory of its own, uint8, shape (size_bytes,), zero, and how others open it. It is there until this process
        ends, whatever becomes of the tensor, for others may be reading it.

        Raises:
            OSError: there is not so much, or none that can be shared.
        """
        ...

    def open(self, card: MemoryCard) -> Tensor:
        """What another process lends, uint8, shape (card.size_bytes,), to read alone; let go of with the tensor.

        Raises:
            OSError: it cannot be opened from here, for instance as its unit is hidden from this process.
        """
        ...

    def reading(self) -> AbstractContextManager[None]:
        """Around ``copy`` and what is computed of the copies, in one thread: whatever was begun before with this
        process's memory on the device is done, and nothing waits for what others begin later."""
        ...

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy bytes of an opened piece into this process's memory on the device; returns once they are there."""
        ...
