"""Reads the structure of an answer: lists, intervals, matrices, relations, numbers. Pure.

What has a structure is compared by it. Only plain expressions go to the parser of formulas, which
drops what it does not know: it would read a matrix as its last entry and ``204_6`` as 204.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from typing import Final, Literal

import msgspec

from rewardhub.rewards import math_text
from rewardhub.rewards.math_numbers import exact_value, unit_name
from rewardhub.rewards.math_split import (
    joined,
    matching_close,
    relation_sides,
    split_items,
    split_top,
)

Kind = Literal[
    "number",
    "percent",
    "clock",
    "ratio",
    "words",
    "list",
    "set",
    "tuple",
    "interval",
    "matrix",
    "cases",
    "system",
    "congruence",
    "builder",
    "relation",
    "expression",
]
SEQUENCES: Final = ("list", "set", "tuple", "interval")
MAX_DEPTH: Final = 6  # of structures in structures
MAX_ITEMS: Final = 400

_MATRICES: Final = frozenset(
    ("matrix", "pmatrix", "bmatrix", "Bmatrix", "smallmatrix", "psmallmatrix", "array")
)
_SYSTEMS: Final = frozenset(
    ("aligned", "align", "align*", "gathered", "gather", "gather*", "split", "alignedat")
)
_ENVIRONMENT: Final = re.compile(
    r"(?:\\\{|[\[(|])?\s*\\begin\{(?P<name>[a-zA-Z]+\*?)\}(?:\s*\{[lcr"
    r"|@{} ]*\})?(?P<body>.*)\\end\{(?P=name)\}"
    r"\s*(?:\\\}|[\])|])?",
    re.DOTALL,
)
_REVERSED: Final = {">": "<", "\\ge": "\\le"}
_LEAD: Final = re.compile(r"\\text\s*\{[^{}]*(?:\bis|\bare|:)\s*\}\s*:?")
_CLOCK: Final = re.compile(
    r"(\d{1,2}):([0-5]\d)(?::([0-5]\d))?\s*(?:\\text\s*\{)?\s*(?:([ap])\s*\.?\s*m\.?)?\s*\}?",
    re.IGNORECASE,
)
_RATIO: Final = re.compile(r"\d+(?:\.\d+)?(?:\s*:\s*\d+(?:\.\d+)?)+")
_PERCENT: Final = re.compile(
    r"(.*\S)\s*(?:\\?%|\\text\s*\{\s*(?:percent|\\?%)\s*\}|percent(?:age)?|pct)", re.DOTALL
)
_MODULUS: Final = re.compile(
    r"[,\s]*(?:\\pmod\s*(?:\{(?P<braced>[^{}]*)\}|(?P<bare>\w+))|\\bmod\s*(?P<bmod>\w+)"
    r"|\(?\s*(?:\\(?:mod|operatorname\{mod\}|text\s*\{\s*mod\s*\})"
    r"|mod)\s*\{?(?P<mod>\w+)\}?\s*\)?)$"
)
_DEGREES: Final = re.compile(r"\s*\^\s*\{?\s*\\circ\s*\}?\s*(?:\\text\s*\{\s*[CF]\s*\}|[CF])?$")
_UNIT: Final = re.compile(
    r"(?P<value>.*[\d)}\]])\s*(?:\\(?:text(?:bf|it|rm|normal)?|math(?:rm|bf|it)|mbox"
    r"|operatorname)\s*"
    r"\{(?P<unit>[^{}\\]*[A-Za-z][^{}\\]*)\}(?:\s*\^\s*\{?\d\}?)?)\.?",
    re.DOTALL,
)
_WORDS: Final = re.compile(r"[A-Za-z][A-Za-z'’\-]*(?:[ ,]+[A-Za-z'’\-]+)*[.!?]?")
_NAME: Final = re.compile(r"(?:\\[A-Za-z]++|[A-Za-z]|_\{[^{}]*\}|_\w|['(){}, :|;])++")


class Node(msgspec.Struct, frozen=True):
    """An answer or a part of it.

    Attributes:
        text: its source as plain LaTeX.
        parts: items, cells row by row, sides of a relation, or what stands for them in the other
            kinds.
        label: brackets, relation signs, the shape of a matrix, the half of the day.
        value: of a number, percentage or ratio.
        is_decimal: whether a number has a decimal point.
        unit: the unit of physics after a number, by its first name.
    """

    kind: Kind
    text: str
    parts: tuple[Node, ...] = ()
    label: str = ""
    value: Fraction | None = None
    is_decimal: bool = False
    unit: str = ""


def read(text: str) -> Node:
    """Return the structure of an answer in LaTeX or plain text."""
    source = math_text.to_latex(text) if math_text.is_formula(text) else text
    return _read_node(math_text.plain_latex(source), 0)


def _read_node(text: str, depth: int) -> Node:
    text = (
        text.strip().strip("$").rstrip(".,;").strip() if not text.endswith("..") else text.strip()
    )
    if depth <= MAX_DEPTH:
        for reader in _READERS:
            node = reader(text, depth)
            if node is not None:
                return node
    return Node("expression", text)


def _read_group(text: str, depth: int) -> Node | None:
    """Read what stands in a group or in ``\\text{}``."""
    whole = math_text.TEXT_COMMAND.fullmatch(text)
    if whole is not None:
        content = whole[1].strip()
        return (
            _read_node(content, depth + 1) if re.search(r"\d", content) else Node("words", content)
        )
    if (lead := _LEAD.match(text)) is not None:
        return _read_node(text[lead.end() :], depth + 1)
    if text.startswith("{") and matching_close(text) == len(text):
        return _read_node(text[1:-1], depth)
    return None


def _read_words(text: str, _depth: int) -> Node | None:
    if not _WORDS.fullmatch(text) or math_text.is_formula(text):
        return None
    return Node("words", text)


def _read_environment(text: str, depth: int) -> Node | None:
    match = _ENVIRONMENT.fullmatch(text)
    if match is None or f"\\end{{{match['name']}}}" in match["body"]:
        return None
    rows = [split_top(row, "&") for row in split_top(match["body"], "\\\\") if row.strip()]
    if sum(map(len, rows)) > MAX_ITEMS or not rows:
        return None
    if match["name"] in _MATRICES:
        if match["name"] == "array" and text[0] == "|":  # a determinant
            return None
        if len({len(row) for row in rows}) != 1:
            return Node("words", text)
        cells = tuple(_read_node(cell, depth + 1) for row in rows for cell in row)
        kind: Kind = (
            "system"
            if text.startswith("\\{") and any(cell.kind == "relation" for cell in cells)
            else "matrix"
        )
        return Node(kind, text, cells, label=f"{len(rows)}x{len(rows[0])}")
    if match["name"] == "cases":
        if all(len(row) == 1 for row in rows):
            return Node("system", text, tuple(_read_node(row[0], depth + 1) for row in rows))
        return Node("cases", text, tuple(_read_case(row, depth) for row in rows))
    if match["name"] in _SYSTEMS:
        lines = [" ".join(row).strip() for row in rows]
        # a calculation in steps
        if len(lines) > 1 and all(line.startswith("=") for line in lines[1:]):
            return _read_node(" ".join(lines), depth + 1)
        return Node("system", text, tuple(_read_node(line, depth + 1) for line in lines))
    return None


def _read_case(row: list[str], depth: int) -> Node:
    condition = re.sub(
        r"^\s*(?:\\text\s*\{\s*(?:if|for|when)\s*\}|if\b|for\b)", "", " ".join(row[1:])
    )
    return Node(
        "tuple",
        " & ".join(row),
        (_read_node(row[0], depth + 1), _read_node(condition, depth + 1)),
        label="()",
    )


def _read_congruence(text: str, depth: int) -> Node | None:
    modulus = _MODULUS.search(text)
    if modulus is None or modulus["bmod"]:
        return None
    sides = split_top(text[: modulus.start()], "\\equiv")
    if len(sides) > 2 or any("\\equiv" in side or "mod" in side for side in sides):
        return None
    base = next(group for group in modulus.groups() if group is not None).strip()
    residues = tuple(_read_node(item, depth + 1) for item in split_items(sides[-1]))
    left_side = math_text.canonical(sides[0]) if len(sides) == 2 else ""
    return Node("congruence", text, (_read_node(base, depth + 1), *residues), label=left_side)


def _read_sequence(text: str, depth: int) -> Node | None:
    """Read items between commas, semicolons, "and" or "or" without brackets."""
    if math_text.number(text) is not None or ("\\pm" in text and len(split_items(text)) == 1):
        return _read_both_signs(text, depth)
    items = split_items(text)
    if not 1 < len(items) <= MAX_ITEMS or not all(item.strip() for item in items):
        return None
    parts = [_read_node(item, depth + 1) for item in items]
    flat = [part for node in parts for part in (node.parts if node.kind == "list" else (node,))]
    return Node("list", text, tuple(flat))


def _read_both_signs(text: str, depth: int) -> Node | None:
    if text.count("\\pm") != 1 or "\\mp" in text:
        return None
    upper, lower = (
        _read_node(re.sub(r"\\pm(?![A-Za-z])", sign, text), depth + 1) for sign in ("+", "-")
    )
    return Node("list", text, (upper, lower))


def _read_bracketed(text: str, depth: int) -> Node | None:
    """Read a set, tuple, interval or anything in brackets."""
    start = 2 if text.startswith("\\{") else 1
    if not text or text[:start] not in ("(", "[", "\\{", "]") or len(text) < start + 1:
        return None
    # An open end, as in ]0,1[.
    if text[0] == "]":
        if not text.endswith("[") or len(split_top(text[1:-1], ",")) != 2:
            return None
        return _read_node(f"({text[1:-1]})", depth + 1)
    if matching_close(text) != len(text):
        return None
    end = 2 if text.endswith("\\}") else 1
    inner = text[start:-end]
    brackets = text[:start] + text[-end:]
    if not inner.strip():
        return None
    if brackets == "\\{\\}" and (builder := _read_builder(text, inner, depth)) is not None:
        return builder
    items = split_items(inner)
    if len(items) == 1:
        return _read_node(inner, depth) if brackets in ("()", "[]", "\\{\\}") else None
    if len(items) > MAX_ITEMS:
        return None
    parts = tuple(_read_node(item, depth + 1) for item in items)
    if brackets == "\\{\\}":
        flat = tuple(
            part for node in parts for part in (node.parts if node.kind == "list" else (node,))
        )
        return Node("set", text, flat)
    kind: Kind = "tuple" if brackets == "()" or len(parts) != 2 else "interval"
    return Node(kind, text, parts, label=brackets)


def _read_builder(text: str, inner: str, depth: int) -> Node | None:
    for separator in ("\\mid", "\\vert", "|", ":", "\\colon"):
        sides = split_top(inner, separator)
        if len(sides) == 2:
            return Node("builder", text, tuple(_read_node(side, depth + 1) for side in sides))
    return None


def _read_relation(text: str, depth: int) -> Node | None:
    sides, signs = relation_sides(text)
    if not signs or len(signs) > 8:
        return None
    # What is exact counts; a name alone is approximately what follows it.
    if "\\approx" in signs:
        cut = signs.index("\\approx")
        if cut or not is_name(sides[0]):
            return _read_node(joined(sides[: cut + 1], signs[:cut]), depth + 1)
        sides = sides[:2]
        signs = ["="]
    if not all(side.strip() for side in sides):
        return None
    if all(sign in _REVERSED or sign == "=" for sign in signs) and any(
        sign in _REVERSED for sign in signs
    ):
        sides = sides[::-1]
        signs = [_REVERSED.get(sign, sign) for sign in reversed(signs)]
    parts = tuple(_read_node(side, depth + 1) for side in sides)
    return Node("relation", joined(sides, signs), parts, label=" ".join(signs))


def is_name(text: str) -> bool:
    """Return whether a side of an equation only names the other: ``x``, ``f(x)``, ``AB``."""
    return len(text) <= 60 and _NAME.fullmatch(text.strip()) is not None


def _read_number(text: str, depth: int) -> Node | None:
    """Read a number in any notation."""
    if (plain := math_text.number(text) or math_text.decimal_comma(text)) is not None:
        return Node("number", text, value=plain[0], is_decimal=plain[1])
    if (value := exact_value(text)) is not None:
        return Node("number", text, value=value)
    if (clock := _CLOCK.fullmatch(text)) is not None:
        hours, minutes, seconds, half = clock.groups()
        fields = (str(int(hours)), minutes, seconds or "00")
        parts = tuple(Node("number", field, value=Fraction(field)) for field in fields)
        return Node(
            "clock",
            text,
            parts,
            label=(half or "").lower(),
            value=_quotient_value(text) if not half else None,
        )
    if _RATIO.fullmatch(text):
        parts = tuple(
            Node("number", term, value=Fraction(term.strip())) for term in text.split(":")
        )
        return Node("ratio", text, parts, value=_quotient_value(text))
    if (percent := _PERCENT.fullmatch(text)) is not None:
        inner = _read_node(percent[1], depth + 1)
        if inner.kind == "number" and inner.value is not None:
            return Node("percent", text, value=inner.value / 100, is_decimal=inner.is_decimal)
    return None


def _quotient_value(text: str) -> Fraction | None:
    terms = [Fraction(re.sub(r"[^\d.]", "", term)) for term in text.split(":")]
    return terms[0] / terms[1] if len(terms) == 2 and terms[1] else None


def _read_measured(text: str, depth: int) -> Node | None:
    """Read a value with its unit; only a unit of physics is kept."""
    if (degrees := _DEGREES.search(text)) is not None and degrees.start():
        return _read_node(text[: degrees.start()], depth + 1)
    unit = ""
    if (match := _UNIT.fullmatch(text)) is not None:
        value = match["value"]
        unit = match["unit"]
    elif (
        math_text.has_unit(text)
        and (match := re.match(r"[-+]?\s*\\?\$?\s*-?[\d.,]*\d", text)) is not None
    ):
        value = match[0]
        unit = text[match.end() :]
    else:
        return None
    node = _read_node(value, depth + 1)
    return msgspec.structs.replace(node, unit=unit_name(unit)) if node.kind == "number" else node


_READERS: Final[tuple[Callable[[str, int], Node | None], ...]] = (
    *(
        _read_group,
        _read_number,
        _read_words,
        _read_environment,
        _read_congruence,
        _read_measured,
        _read_sequence,
        _read_bracketed,
        _read_relation,
    ),
)
