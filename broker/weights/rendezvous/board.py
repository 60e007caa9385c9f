"""Keys, values and waits of the rendezvous, without clock and network."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Final

MAX_KEYS: Final = 100_000
MAX_BYTES: Final = 64 << 20  # of all keys and values
MAX_WAITS: Final = 10_000


class BoardFull(ValueError):
    """A limit of the board would be exceeded, or the key is read-only."""


@dataclass(frozen=True)
class Ended:
    """A wait that has ended; values of its keys, None after its timeout."""

    token: Hashable
    values: list[bytes] | None


class Board:
    """State of the rendezvous. Keys are texts, values are bytes.

    Args:
        max_keys: most keys.
        max_bytes: most bytes of keys and values together.
    """

    def __init__(self, max_keys: int = MAX_KEYS, max_bytes: int = MAX_BYTES) -> None:
        self._values: dict[str, bytes] = {}
        self._sealed: set[str] = set()
        self._waits: dict[Hashable, tuple[tuple[str, ...], float]] = {}
        self._max_keys = max_keys
        self._max_bytes = max_bytes
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._values)

    def set(self, key: str, value: bytes) -> None:
        """Store a value.

        Raises:
            BoardFull: if the key is sealed, or a limit would be exceeded.
        """
        if key in self._sealed:
            raise BoardFull(f"key {key[:80]!r} is read-only")
        previous = self._values.get(key)
        more = len(value) - len(previous) if previous is not None else len(key) + len(value)
        if (
            previous is None and len(self._values) >= self._max_keys
        ) or self.size_bytes + more > self._max_bytes:
            raise BoardFull(
                f"the rendezvous is full: {len(self._values)} keys, {self.size_bytes} bytes"
            )
        self._values[key] = value
        self.size_bytes += more

    def seal(self, key: str) -> None:
        """Make a key read-only."""
        self._sealed.add(key)

    def get(self, key: str) -> bytes | None:
        """Return a value, None without one."""
        return self._values.get(key)

    def has(self, keys: Sequence[str]) -> bool:
        """Return whether all keys are there."""
        return all(key in self._values for key in keys)

    def append(self, key: str, value: bytes) -> None:
        """Append to a value, which is empty at first; limits as in ``set``."""
        self.set(key, (self._values.get(key) or b"") + value)

    def add(self, key: str, amount: int) -> int:
        """Add to a number, which is 0 at first, and return the sum; limits as in ``set``.

        Raises:
            ValueError: if the value is not a number.
        """
        total = int(self._values.get(key) or b"0") + amount
        self.set(key, str(total).encode())
        return total

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Store ``desired`` if the value is ``expected``, or if it is missing and ``expected``
        empty; as torch does.

        Returns:
            The value afterwards; ``expected`` if it is missing.
        """
        now = self._values.get(key)
        if now == expected or (now is None and not expected):
            self.set(key, desired)
            return desired
        return expected if now is None else now

    def delete(self, key: str) -> bool:
        """Delete a key; return whether it existed.

        Raises:
            BoardFull: if it is sealed.
        """
        if key in self._sealed:
            raise BoardFull(f"key {key[:80]!r} is read-only")
        value = self._values.pop(key, None)
        if value is not None:
            self.size_bytes -= len(key) + len(value)
        return value is not None

    def wait(self, token: Hashable, keys: Sequence[str], deadline: float) -> None:
        """Begin to wait for all keys; a second wait of the same token replaces the first.

        Raises:
            BoardFull: if too many wait.
        """
        if len(self._waits) >= MAX_WAITS:
            raise BoardFull(f"{MAX_WAITS} requests wait already")
        self._waits[token] = (tuple(keys), deadline)

    def ended(self, now: float) -> list[Ended]:
        """Return the waits that have ended since the last call, and forget them."""
        waits: list[Ended] = []
        for token, (keys, deadline) in list(self._waits.items()):
            if self.has(keys):
                waits.append(Ended(token, [self._values[key] for key in keys]))
            elif now >= deadline:
                waits.append(Ended(token, None))
            else:
                continue
            del self._waits[token]
        return waits

    def next_deadline(self) -> float | None:
        """Return when the first wait ends by its timeout, None without waits."""
        return min((deadline for _, deadline in self._waits.values()), default=None)
