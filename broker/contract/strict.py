"""Strict parsing of external text and JSON: refuses values that could not be encoded again.

JSON can spell half of a surrogate pair (``"\\ud83d"``), which UTF-8 cannot encode, and Python's
parser accepts NaN and Infinity, which JSON and the wire refuse. A NUL is an ordinary character.
"""

from __future__ import annotations

import json
import math
from typing import Any, Final, NoReturn


class BadJson(ValueError):
    """The text is not JSON, or holds values that JSON must not; the message is one line."""


def text_problem(text: str) -> str:
    """Return why a text cannot be encoded as UTF-8, empty if it can."""
    if text.isascii():
        return ""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"not valid Unicode: half of a surrogate pair at {error.start}"
    return ""


def parse_json(data: str | bytes | bytearray) -> Any:
    """Parse a JSON text; bytes must be UTF-8.

    Raises:
        BadJson: if it is not JSON, nested too deeply, or holds NaN, an infinite number or half of a
            surrogate pair.
    """
    text = _decode_utf8(data).strip(_WHITE)
    value, end = decode_prefix(text)
    if end != len(text):
        raise BadJson("extra data after the value")
    return value


def decode_prefix(text: str, start: int = 0) -> tuple[Any, int]:
    """Parse the JSON value that begins at ``start``; return it and the index after it.

    Raises:
        BadJson: as ``loads`` does.
    """
    try:
        value, end = _DECODER.raw_decode(text, start)
        read = text[start:end]
        if ("\\u" in read or not read.isascii()) and text_problem(
            json.dumps(value, ensure_ascii=False)
        ):
            raise BadJson("it holds half of a surrogate pair, which is not text")
    except BadJson:
        raise
    except json.JSONDecodeError as error:
        raise BadJson(error.msg) from None
    except (ValueError, RecursionError) as error:
        raise BadJson(" ".join(str(error).split())[:200]) from None
    return value, end


def _decode_utf8(data: str | bytes | bytearray) -> str:
    if isinstance(data, str):
        return data
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise BadJson(f"{error.reason} at byte {error.start}; it must be UTF-8") from None


def _refuse_constant(name: str) -> NoReturn:
    raise BadJson(f"it holds {name}")


def _parse_float(digits: str) -> float:
    if not math.isfinite(number := float(digits)):
        raise BadJson(f"the number {digits[:40]} is too large")
    return number


_WHITE: Final = " \t\r\n"
_DECODER: Final = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_parse_float)
