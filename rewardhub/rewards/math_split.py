"""Splits formulas at commas, words and relation signs outside brackets and environments. Pure."""

from __future__ import annotations

import re
from typing import Final

_OPEN = "([{"
_CLOSE = ")]}"
_TOKEN: Final = re.compile(
    r"\\begin\{[a-zA-Z]+\*?\}|\\end\{[a-zA-Z]+\*?\}|\\[A-Za-z]+|\\.|.", re.DOTALL
)
_RELATIONS: Final = {
    **{"=": "=", "<": "<", ">": ">", "\\le": "\\le", "\\ge": "\\ge", "\\ne": "\\ne"},
    **{"\\in": "\\in", "\\approx": "\\approx", "\\simeq": "\\approx", "\\sim": "\\approx"},
}
_AND: Final = re.compile(r"\s*,?\s*\\text\s*\{[\s,]*(?:and|or)\s*\}\s*,?\s*")
_WORD_AND: Final = re.compile(r"\s*,?\s*(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])\s*")
_EITHER: Final = re.compile(r"\\lor(?![A-Za-z])")  # only between relations


def tokens(text: str) -> list[tuple[str, int, int]]:
    """Return the tokens of LaTeX with their places and how many brackets are open around each."""
    tokens_found = []
    level = 0
    for match in _TOKEN.finditer(text):
        token = match[0]
        if token.startswith("\\end{") or token in _CLOSE or token == "\\}":
            level -= 1
        tokens_found.append((token, match.start(), level))
        if token.startswith("\\begin{") or token in _OPEN or token == "\\{":
            level += 1
    return tokens_found


def split_top(text: str, separator: str) -> list[str]:
    """Split at a separator outside brackets and environments."""
    pieces = []
    start = 0
    may_group = separator == "," and re.search(r",\s", text) is not None
    for token, position, level in tokens(text):
        if level == 0 and token == separator:
            if may_group and _groups_digits(text, position):
                continue
            pieces.append(text[start:position].strip())
            start = position + len(token)
    return [*pieces, text[start:].strip()]


def _groups_digits(text: str, position: int) -> bool:
    """Return whether a comma stands between digit groups of one number, as in ``1,234, 5``."""
    digits_before = re.search(
        r"(?<![\d,])\d{1,3}(?:,\d{3}){0,9}$", text[max(0, position - 40) : position]
    )
    digits_after = re.match(r",\d{3}(?!\d)", text[position:])
    return digits_before is not None and digits_after is not None


def _depth_at(text: str, position: int) -> int:
    return next((level for _, place, level in tokens(text) if place >= position), 0)


def matching_close(text: str) -> int:
    """Return the position after the bracket that closes the first, of any shape; 0 without one."""
    for token, position, level in tokens(text):
        if position and level == 0:
            return position + len(token)
    return 0


def split_items(text: str) -> list[str]:
    groups = split_top(text, ";")
    if len(groups) > 1:
        return [f"({group})" if len(split_items(group)) > 1 else group for group in groups]
    alternatives = _split_words(text)
    if len(alternatives) > 1 and all(
        "=" in group and len(split_top(group, ",")) > 1 for group in alternatives
    ):
        return [f"({group})" for group in alternatives]  # x = 1, y = 2 or x = 3, y = 4
    pieces = [piece for part in split_top(text, ",") for piece in _split_words(part)]
    return [piece for piece in pieces if piece.strip()] if len(pieces) > 1 else pieces


def _split_words(text: str) -> list[str]:
    """Split at "and" and "or" outside brackets."""
    if _EITHER.search(text) and all(relation_sides(side)[1] for side in _EITHER.split(text)):
        return _EITHER.split(text)
    matches = [match for pattern in (_AND, _WORD_AND) for match in pattern.finditer(text)]
    pieces = []
    start = 0
    for match in sorted(matches, key=lambda match: match.start()):
        if match.start() >= start and _depth_at(text, match.start()) == 0:
            pieces.append(text[start : match.start()])
            start = match.end()
    return [*pieces, text[start:]]


def joined(sides: list[str], signs: list[str]) -> str:
    return sides[0] + "".join(
        f" {sign} {side}" for sign, side in zip(signs, sides[1:], strict=True)
    )


def relation_sides(text: str) -> tuple[list[str], list[str]]:
    sides = []
    signs = []
    start = 0
    for token, position, level in tokens(text):
        if level == 0 and token in _RELATIONS:
            sides.append(text[start:position].strip())
            signs.append(_RELATIONS[token])
            start = position + len(token)
    return [*sides, text[start:].strip()], signs
