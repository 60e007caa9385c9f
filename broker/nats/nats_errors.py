"""Errors of calls to the broker."""

from __future__ import annotations

import msgspec

from broker.errors import LostState, RlearnerError


class Disconnected(RlearnerError):
    """The connection broke before the reply arrived; the request may have taken effect."""


class NoResponders(RlearnerError):
    """Nothing listens on the subject."""


class ApiError(RlearnerError):
    """JetStream refused a request; ``code`` is the HTTP-like status, ``err_code`` the JetStream
    error number.
    """

    def __init__(self, code: int, err_code: int, description: str) -> None:
        super().__init__(f"{description} ({err_code})")
        self.code = code
        self.err_code = err_code
        self.description = description


class NoStream(ApiError, LostState):
    """The stream does not exist: the run was purged, or the broker lost its store."""


class ErrorDescription(msgspec.Struct):
    """The error field of a JetStream reply."""

    code: int
    err_code: int = 0
    description: str = ""
