"""Reads exact numbers in other notations: fractions, mixed numbers, repeating decimals, bases;
names of units. Pure.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Final

LONGEST_NUMBER: Final = 200  # characters
_SUBSCRIPT: Final = re.compile(
    r"\(?(?P<digits>[0-9A-Fa-f]+)\)?_(?:\{(?P<base>[^{}]*(?:\{[^{}]*\})?[^{}]*)\}|(?P<digit>\d+))"
)
_BASE_NAMES: Final = {
    "two": 2,
    "three": 3,
    "four": 4,
    "five": 5,
    "six": 6,
    "seven": 7,
    "eight": 8,
    "nine": 9,
}
_BASE_NAMES_LONG: Final = {"ten": 10, "twelve": 12, "sixteen": 16}
_REPEATING: Final = re.compile(
    r"(?P<sign>[-+]?)(?P<whole>\d*)\.(?P<head>\d*)"
    r"(?:\\(?:overline|bar|dot)\s*(?:\{(?P<bar>\d+)\}|(?P<one>\d))|\((?P<round>\d+)\)"
    r"|\\dot\{(?P<first>\d)\}(?P<middle>\d*)\\dot\{(?P<last>\d)\})"
)
_ELLIPSIS: Final = re.compile(r"([-+]?)(\d*)\.(\d*?)(\d+?)\4{2,}\s*(?:\\[lc]?dots|\.\.\.)")
_MIXED: Final = re.compile(
    r"(?P<sign>[-+]?)\s*(?P<whole>\d+)"
    r"(?:\s*\\frac\s*\{\s*(?P<up>\d+)\s*\}\s*\{\s*(?P<down>\d+)\s*\}"
    r"|\s+(?P<over>\d+)\s*/\s*(?P<under>\d+))"
)
_FRACTION: Final = re.compile(
    r"(?P<sign>[-+]?)\s*(?:\\frac\s*\{\s*(?P<up>-?\d+)\s*\}\s*\{\s*(?P<down>-?\d+)\s*\}"
    r"|(?P<over>\d+)\s*/\s*(?P<under>\d+))"
)
_UNITS: Final = (
    *(
        ("cm", "centimeter", "centimetre"),
        ("mm", "millimeter", "millimetre"),
        ("km", "kilometer", "kilometre"),
    ),
    *(
        ("m", "meter", "metre"),
        ("kg", "kilogram"),
        ("g", "gram"),
        ("mg", "milligram"),
        ("l", "liter", "litre"),
    ),
    *(
        ("ml", "milliliter", "millilitre"),
        ("s", "second", "sec"),
        ("min", "minute"),
        ("h", "hour", "hr"),
        ("day",),
    ),
    *(
        ("inch", "inche", "in"),
        ("ft", "foot", "feet"),
        ("yd", "yard"),
        ("mile", "mi"),
        ("week",),
        ("year",),
        ("month",),
    ),
)


def exact_value(text: str) -> Fraction | None:
    """Return the value of a fraction, mixed, repeating or based number; None for others."""
    if len(text) > LONGEST_NUMBER:
        return None
    return next((value for reader in _READERS if (value := reader(text)) is not None), None)


def _fraction_value(text: str) -> Fraction | None:
    match = _FRACTION.fullmatch(text)
    if match is None:
        return None
    down = int(match["down"] or match["under"])
    value = Fraction(int(match["up"] or match["over"]), down) if down else None
    return -value if value is not None and match["sign"] == "-" else value


def _mixed_value(text: str) -> Fraction | None:
    """Return the value of a mixed number: ``3 1/2`` and ``3\\frac{1}{2}`` are seven halves."""
    match = _MIXED.fullmatch(text)
    if match is None:
        return None
    up = int(match["up"] or match["over"])
    down = int(match["down"] or match["under"])
    if not 0 < up < down:
        return None
    value = int(match["whole"]) + Fraction(up, down)
    return -value if match["sign"] == "-" else value


def _repeating_value(text: str) -> Fraction | None:
    """Return the value of a decimal that repeats for ever."""
    if (match := _ELLIPSIS.fullmatch(text)) is not None:
        sign, whole, head, period = match.groups()
    elif (match := _REPEATING.fullmatch(text)) is not None:
        sign = match["sign"]
        whole = match["whole"]
        head = match["head"]
        period = match["bar"] or match["one"] or match["round"]
        period = period or match["first"] + match["middle"] + match["last"]
    else:
        return None
    scale = 10 ** len(head)
    value = Fraction(int(whole + head or "0"), scale) + Fraction(
        int(period), scale * (10 ** len(period) - 1)
    )
    return -value if sign == "-" else value


def _value_in_base(text: str) -> Fraction | None:
    """Return the value of a number with its base, such as ``204_5``."""
    match = _SUBSCRIPT.fullmatch(text)
    if match is None or (
        not (match["digits"][0].isdigit() or text.startswith("(")) and match["digit"]
    ):
        return None
    name = re.sub(r"\\text|\\mathrm|[{}() ]|base", "", match["base"] or match["digit"])
    base = (
        int(name)
        if name.isdecimal() and len(name) < 3
        else {**_BASE_NAMES, **_BASE_NAMES_LONG}.get(name, 0)
    )
    if not 2 <= base <= 36:
        return None
    try:
        return Fraction(int(match["digits"], base))
    except ValueError:
        return None


def unit_name(unit: str) -> str:
    word = unit.strip(" .").lower()
    return next(
        (names[0] for names in _UNITS if word in names or word.removesuffix("s") in names), ""
    )


_READERS: Final = (_fraction_value, _mixed_value, _repeating_value, _value_in_base)
