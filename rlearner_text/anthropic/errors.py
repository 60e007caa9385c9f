"""Error answers in Anthropic's form, and which requests get them."""

from __future__ import annotations

from typing import Any, Final

from aiohttp import web

from rlearner_text.openai.http_errors import HttpError

_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
}
# Clients look for these words to know that a conversation must be shortened.
TOO_LONG: Final = "prompt is too long"


def speaks_anthropic(request: web.Request) -> bool:
    """Return whether a request follows Anthropic's protocol: by its path, else by its headers."""
    return request.path.startswith("/v1/messages") or "anthropic-version" in request.headers


def error_body(problem: HttpError) -> dict[str, Any]:
    """Return the JSON of an error answer."""
    kind = "invalid_request_error"
    if problem.status >= 500:
        kind = "api_error"
    message = problem.message
    if problem.code == "context_length_exceeded":
        message = f"{TOO_LONG}: {message}"
    return {
        "type": "error",
        "error": {"type": _TYPES.get(problem.status, kind), "message": message},
    }
