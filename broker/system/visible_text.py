"""Makes control characters of untrusted text visible before it reaches a terminal or a log."""

from __future__ import annotations

import json
import re
from typing import Any, Final

# C0 and C1 controls, marks and overrides of the writing direction, Unicode's line separators, lone
# surrogates.
_HIDDEN: Final = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
_HIDDEN_IN_LINES: Final = re.compile(_HIDDEN.pattern.replace("\x00-\x1f", "\x00-\x08\x0b-\x1f"))


def visible(text: str, *, newlines: bool = False) -> str:
    r"""Return the text with control characters as ``\x1b`` or ``\u202e``.

    Line feeds and tabs stay if ``newlines``; else they become ``\x0a`` and ``\x09``.
    """
    return (_HIDDEN_IN_LINES if newlines else _HIDDEN).sub(_escape_character, text)


def visible_json(value: Any) -> str:
    """Return a value as one line of JSON without control characters; keeps non-ASCII ones."""
    return _HIDDEN.sub(
        lambda match: f"\\u{ord(match[0]):04x}", json.dumps(value, ensure_ascii=False)
    )


def _escape_character(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
