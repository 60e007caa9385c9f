"""Device memory that another process of this host can open; a learner's staging buffers may lie in
it.

The packing progress and the version stay in host memory (broker.weights.memory.shared), together
with a card that describes the device memory: plain text in a fixed form, so that nothing is
unpickled, readable only by processes of the same user and host. The protocol is the same for all
devices; ``broker.weights.memory.cuda`` is the real one, and the tests have one over host memory.
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
    """What another process needs to open a piece of device memory.

    Attributes:
        kind: the ``SharedDevice.kind``.
        unit: which device, 16 bytes that are the same for all processes of the host: a GPU's UUID.
        size_bytes: of the piece.
        handle: the driver's name for it.
    """

    kind: str
    unit: bytes
    size_bytes: int
    handle: bytes

    @property
    def text(self) -> str:
        """Return the ASCII text that ``from_text`` reads."""
        return f"{self.kind}/{self.unit.hex()}/{self.size_bytes}/{self.handle.hex()}"

    @classmethod
    def from_text(cls, text: str) -> MemoryCard:
        """Return a card that another process wrote.

        Raises:
            ValueError: if it is not a card.
        """
        if (match := CARD.fullmatch(text)) is None:
            raise ValueError(f"{text[:80]!r} is not a card of device memory")
        return cls(match[1], bytes.fromhex(match[2]), int(match[3]), bytes.fromhex(match[4]))


class SharedDevice(Protocol):
    """A device as one process uses it: the learner lends memory, a server opens and copies it."""

    @property
    def kind(self) -> str:
        """Kind of the cards that it writes and reads."""
        ...

    def lend(self, size_bytes: int) -> tuple[Tensor, MemoryCard]:
        """Allocate memory, uint8, shape (size_bytes,), zero, and return it with its card.

        It stays until this process ends, whatever happens to the tensor, because others may be
        reading it.

        Raises:
            OSError: if there is too little memory, or none that can be shared.
        """
        ...

    def open(self, card: MemoryCard) -> Tensor:
        """Open the memory of another process for reading, uint8, shape (card.size_bytes,); freed
        with the tensor.

        Raises:
            OSError: if it cannot be opened here, for example because the device is hidden from this
                process.
        """
        ...

    def reading(self) -> AbstractContextManager[None]:
        """Enclose ``copy`` and computations on the copies, in one thread.

        Work that this process began on the device before is done, and later work of others is not
        awaited.
        """
        ...

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy bytes of opened memory into this process's memory on the device, and wait for them."""
        ...
