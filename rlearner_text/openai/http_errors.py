"""Error answers: an HTTP status and OpenAI's error object."""

from __future__ import annotations

from typing import Any, Final

# Prefix of errors that are not the request's fault.
ENGINE_FAILED: Final = "the engine failed"

_TYPES: Final = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


class HttpError(Exception):
    """An error answer; ``param``: the wrong field of the body, ``code``: for programs.

    ``retry_s``: after how many seconds to try again, None: not said.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_s = retry_s

    @property
    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(
            self.status, "invalid_request_error" if self.status < 500 else "server_error"
        )
        return {
            "error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        }
