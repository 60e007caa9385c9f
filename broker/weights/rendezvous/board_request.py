"""Requests to the rendezvous, and torch's store interface on top of them."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Sequence
from datetime import timedelta
from typing import Annotated, Any, Final, Literal

import msgspec
from torch.distributed import Store  # type: ignore[attr-defined]

MAX_KEY: Final = 1024  # characters
MAX_KEYS: Final = 4096  # of one request
MAX_VALUE_BYTES: Final = 1 << 20  # of a member's value
MAX_WAIT_S: Final = 60.0
# a member's longest wait in one request, so that its other threads get their turn
SLICE_S: Final = 0.2

Key = Annotated[str, msgspec.Meta(max_length=MAX_KEY)]
Value = Annotated[bytes, msgspec.Meta(max_length=MAX_VALUE_BYTES)]
Natural = Annotated[int, msgspec.Meta(ge=0, lt=2**62)]


class BoardRequest(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One operation.

    Attributes:
        keys: of the operation; ``wait`` and ``check`` take several, the others one.
        value: to store, append, or store if the value is ``expected``.
        number: added by ``add``; of the bucket to ``fetch``.
        timeout_s: of ``wait``.
        start: first byte to ``fetch``.
        size: bytes to ``fetch``.
    """

    op: Literal[
        "set", "append", "peek", "wait", "check", "add", "compare_set", "delete", "count", "fetch"
    ]
    keys: Annotated[list[Key], msgspec.Meta(max_length=MAX_KEYS)] = []
    value: Value = b""
    expected: Value = b""
    number: Annotated[int, msgspec.Meta(ge=-(2**62), lt=2**62)] = 0
    timeout_s: Annotated[float, msgspec.Meta(ge=0, le=MAX_WAIT_S)] = 0.0
    start: Natural = 0
    size: Natural = 0


class BoardStore(Store):
    """A torch store whose operations are requests.

    Args:
        timeout_s: how long ``get`` and ``wait`` wait for a key.
    """

    def __init__(self, timeout_s: float) -> None:
        super().__init__()
        self.wait_s = timeout_s

    @abstractmethod
    def request(self, request: BoardRequest) -> list[bytes] | None:
        """Perform an operation; return its values, None if there are none.

        Raises:
            RuntimeError: if it cannot be performed.
        """

    def peek(self, key: str) -> bytes | None:
        """Return a value, None without one."""
        values = self.request(BoardRequest("peek", [key]))
        return values[0] if values else None

    def wait_for(self, key: str, timeout_s: float) -> bytes | None:
        """Wait for a value and return it; None after the timeout."""
        values = self.request(BoardRequest("wait", [key], timeout_s=timeout_s))
        return values[0] if values else None

    def get(self, key: str) -> bytes:
        """Wait for a value and return it."""
        return self._wait([key], self.wait_s)[0]

    def set(self, key: str, value: Any) -> None:
        """Store a value."""
        self.request(BoardRequest("set", [key], value=_bytes(value)))

    def append(self, key: str, value: Any) -> None:
        """Append to a value."""
        self.request(BoardRequest("append", [key], value=_bytes(value)))

    def add(self, key: str, amount: int) -> int:
        """Add to a number and return the sum."""
        return int(_only(self.request(BoardRequest("add", [key], number=amount))))

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        """Store a value if the present one is as expected; return the one afterwards."""
        request = BoardRequest(
            "compare_set", [key], value=_bytes(desired), expected=_bytes(expected)
        )
        return _only(self.request(request))

    def delete_key(self, key: str) -> bool:
        """Delete a key; return whether it existed."""
        return self.request(BoardRequest("delete", [key])) is not None

    def num_keys(self) -> int:
        """Return the number of keys."""
        return int(_only(self.request(BoardRequest("count"))))

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys are there."""
        return self.request(BoardRequest("check", list(keys))) is not None

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are there."""
        self._wait(list(keys), self.wait_s if timeout is None else timeout.total_seconds())

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Wait for several values and return them."""
        return self._wait(list(keys), self.wait_s)

    def multi_set(self, keys: Sequence[str], values: Sequence[Any]) -> None:
        """Store several values."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def clone(self) -> BoardStore:
        """Return this store, which several threads may use; some process groups
        ask for a store of their own.
        """
        return self

    def has_extended_api(self) -> bool:
        """Return that there are ``append``, ``multi_get`` and ``multi_set``."""
        return True

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long ``get`` and ``wait`` wait for a key."""
        self.wait_s = timeout.total_seconds()

    def _wait(self, keys: list[str], timeout_s: float) -> list[bytes]:
        deadline = time.monotonic() + timeout_s
        while True:
            left_s = deadline - time.monotonic()
            values = self.request(
                BoardRequest("wait", keys, timeout_s=max(0.0, min(left_s, SLICE_S)))
            )
            if values is not None:
                return values
            if left_s <= 0:
                raise RuntimeError(
                    f"wait timeout after {timeout_s:g} s, keys: {', '.join(keys)[:200]}"
                )


def _bytes(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def _only(values: list[bytes] | None) -> bytes:
    if not values:
        raise RuntimeError("the rendezvous sent no value")
    return values[0]
