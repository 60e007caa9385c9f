"""Text and JSON from outside, checked where they enter: what cannot be encoded again is refused in one line.

JSON can spell half of a surrogate pair (``"\\ud83d"``, an emoji cut in two), and Python's own parser accepts NaN and
Infinity. Neither can be sent on: no encoding has the first, and JSON and the wire refuse the second. A NUL is an
ordinary character and passes.
"""

from __future__ import annotations

import json
import math
from typing import Any, Final, NoReturn


class BadJson(ValueError):
    """The text is not JSON, or holds what JSON must not; says why in one line."""


def text_problem(text: str) -> str:
    """Why a text cannot be encoded as UTF-8; empty if it can."""
    if text.isascii():
        return ""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"no valid Unicode: half of a surrogate pair at {error.start}"
    return ""


def loads(data: str | bytes | bytearray) -> Any:
    """The value of a JSON text; bytes must be UTF-8.

    Raises:
        BadJson: it is not JSON or nested too deeply, or holds NaN, an infinite number or half of a surrogate pair.
    """
    text = _decoded(data).strip(_WHITE)
    value, end = decode_prefix(text)
    if end != len(text):
        raise BadJson("extra data behind the value")
    return value


def decode_prefix(text: str, start: int = 0) -> tuple[Any, int]:
    """The JSON value that begins at ``start``, and where it ends.

    Raises:
        BadJson: see ``loads``.
    """
    try:
        value, end = _DECODER.raw_decode(text, start)
        read = text[start:end]
        if ("\\u" in read or not read.isascii()) and text_problem(json.dumps(value, ensure_ascii=False)):
            raise BadJson("it holds half of a surrogate pair, which is no text")
    except BadJson:
        raise
    except json.JSONDecodeError as error:
        raise BadJson(error.msg) from None
    except (ValueError, RecursionError) as error:
        raise BadJson(" ".join(str(error).split())[:200]) from None
    return value, end


def _decoded(data: str | bytes | bytearray) -> str:
    if isinstance(data, str):
        return data
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise BadJson(f"{error.reason} at byte {error.start}; it must be UTF-8") from None


def _constant(name: str) -> NoReturn:
    raise BadJson(f"it holds {name}")


def _float(digits: str) -> float:
    if not math.isfinite(number := float(digits)):
        raise BadJson(f"the number {digits[:40]} is too large")
    return number


_WHITE: Final = " \t\r\n"
_DECODER: Final = json.JSONDecoder(parse_constant=_constant, parse_float=_float)
