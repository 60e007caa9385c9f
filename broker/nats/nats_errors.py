"""What may come back from a call to the broker instead of an answer."""

from __future__ import annotations

import msgspec

from broker.errors import LostState, RlearnerError


class Disconnected(RlearnerError):
    """The connection broke before the answer came; it may or may not have been done."""


class NoResponders(RlearnerError):
    """Nobody listens on that subject."""


class ApiError(RlearnerError):
    """JetStream refused a request; ``err_code`` is its own number, ``code`` the HTTP-like class."""

    def __init__(self, code: int, err_code: int, description: str) -> None:
        super().__init__(f"{description} ({err_code})")
        self.code, self.err_code, self.description = code, err_code, description


class NoStream(ApiError, LostState):
    """The stream does not exist: it was purged, or the broker lost its store."""


class ErrorDescription(msgspec.Struct):
    """The error part of every JetStream answer."""

    code: int
    err_code: int = 0
    description: str = ""
