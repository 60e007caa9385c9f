"""Marks special tokens in untrusted text, so that the tokenizer reads them as plain text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any, Final

# A noncharacter, which Unicode reserves for use inside a program.
CUT: Final = "\U0010fffe"
# characters that are searched in one call, which holds the interpreter's lock
_PIECE: Final = 65_536


def shielder(special: Iterable[str]) -> Callable[[str], str]:
    """Return a function that puts ``CUT`` into every special token of a text.

    Overlapping spellings are all cut. A token of one character cannot be cut and stays as it is.
    """
    spelled = sorted(
        {re.escape(token) for token in special if len(token) > 1}, key=len, reverse=True
    )
    if not spelled:
        return lambda text: text
    pattern = re.compile(f"(?=(?:{'|'.join(spelled)}))(.)", re.DOTALL)
    longest = max(map(len, spelled))

    def shield(text: str) -> str:
        if len(text) <= _PIECE:
            return pattern.sub(rf"\1{CUT}", text)
        pieces = range(0, len(text), _PIECE)
        return "".join(_shield_piece(pattern, text, start, longest) for start in pieces)

    return shield


def _shield_piece(pattern: re.Pattern[str], text: str, start: int, longest: int) -> str:
    """Return a piece of a text, shielded against the tokens that begin in it."""
    end = min(start + _PIECE, len(text))
    position = start
    parts = []
    for match in pattern.finditer(text, start, end + longest):
        if match.start() >= end:
            break
        parts += [text[position : match.end()], CUT]
        position = match.end()
    return "".join([*parts, text[position:end]])


def shield_values(shield: Callable[[str], str], value: Any) -> Any:
    """Return a JSON value with every string in it shielded, keys included."""
    if isinstance(value, str):
        return shield(value)
    if isinstance(value, dict):
        return {
            shield_values(shield, key): shield_values(shield, item) for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [shield_values(shield, item) for item in value]
    return value


def encode_parts(text: str, encode: Callable[[str], list[int]]) -> list[int]:
    """Return the token ids of a text; the parts between its cuts are encoded apart."""
    if CUT not in text:
        return encode(text)
    return [token for part in text.split(CUT) if part for token in encode(part)]
