"""Parses and compares expressions with latex2sympy and math-verify; finds numbers in prose."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any, Final

from rewardhub.rewards import math_text
from rewardhub.rewards.math_read import Node, read

SMALL: Final = 1e-3
# What the parser would misread: digits next to digits, subscripts of numbers, colons, decimals
# without end.
_UNREADABLE: Final = re.compile(
    r"(?<![_^])\d\s+[\d.]|\d_|\d\)_|:|\.\.\.|\\ldots|\\cdots|\\dots|\\pmod|\\equiv|\\mid|[?#@\"]"
    r"|^(?!.*\\begin).*(?:&|\\\\)",
    re.DOTALL,
)
_IMAGINARY_FACTOR: Final = re.compile(r"(?<=[\d)}])i(?![A-Za-z])")
_FACTOR: Final = re.compile(r"(\\frac\s*\{[^{}]*\}\s*\{[^{}]*\})\s+(?=\d)")
_UNIT_OF_ROOT: Final = re.compile(
    r"(?<![A-Za-z\\])\\?(?:i|imath|mathrm\s*\{i\}|text\s*\{i\})(?![A-Za-z])"
)
_INDEX: Final = re.compile(
    r"_\{?\s*i(?![A-Za-z])|(?<![A-Za-z])i\s*(?:=|\\in)|[<>j]|\\[lg]e(?![A-Za-z])|\\equiv"
    r"|\\(?:max|min)"
)
_LAST_NUMBER: Final = re.compile(
    r"-?\\[dtc]?frac\{-?\d+\}\{-?\d+\}|(?<![A-Za-z0-9_.,:/^{])[-+−]?(?:\\?[$€£¥]\s?)?-?"
    r"(?:\d{1,3}(?:[ \u00a0\u2009\u202f]\d{3})+(?!\d)|[\d][\d,]*)?(?:\.\d+)?"
    r"(?:\s+\d+/\d+|:\d\d(?!\d)|/\d+|_\{?\d+\}?|!+)?(?:\s*\\?%)?"
)


def is_imaginary(gold: str) -> bool:
    """Return whether ``i`` is the imaginary unit in a reference and its answers, no variable."""
    return _UNIT_OF_ROOT.search(gold) is not None and _INDEX.search(gold) is None


def parsed(node: Node, *, imaginary: bool) -> Any:
    """Return the sympy expression of a node, or None."""
    import sympy

    if node.kind in ("number", "percent", "ratio") and node.value is not None:
        exact = sympy.Rational(node.value.numerator, node.value.denominator)
        return sympy.Float(exact, 30) if node.is_decimal else exact
    return _parse_latex(node.text, imaginary)


@lru_cache(maxsize=64)
def _parse_latex(text: str, imaginary: bool) -> Any:
    import sympy
    from latex2sympy2_extended import NormalizationConfig, latex2sympy, normalize_latex
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig

    if not text or _UNREADABLE.search(text):
        return None
    source = _FACTOR.sub(r"\1 \\cdot ", _IMAGINARY_FACTOR.sub(" i", text))
    # Its removal of units also removes variables: ``3t`` would be 3.
    config = NormalizationConfig(
        basic_latex=True, malformed_operators=True, nits=True, boxed="none"
    )
    try:
        expression = latex2sympy(
            normalize_latex(source, config),
            is_real=not imaginary,
            normalization_config=None,
            conversion_config=ConversionConfig(lowercase_symbols=False),
        )
    except Exception:  # noqa: BLE001 - the parser raises plain exceptions
        return None
    unit = sympy.Symbol("i", real=False)
    if imaginary and isinstance(expression, sympy.Basic) and unit in expression.free_symbols:
        return expression.xreplace({unit: sympy.I})
    return expression


def is_undefined(expression: Any) -> bool:
    """Return whether an expression has no value, such as 1/0."""
    import sympy

    return bool(expression.has(sympy.zoo, sympy.nan))


def ordered(expression: Any) -> Any:
    """Return an expression with the factors and terms of each product and sum in sympy's order."""
    import sympy

    return expression.replace(
        lambda node: isinstance(node, (sympy.Mul, sympy.Add)), lambda node: node.func(*node.args)
    )


def is_same_equation(gold: Any, answer: Any) -> bool:
    """Return whether two equations are known to be multiples of each other."""
    import sympy

    if not (isinstance(gold, sympy.Eq) and isinstance(answer, sympy.Eq)):
        return False
    sides = [equation.lhs - equation.rhs for equation in (gold, answer)]
    if not all(side.free_symbols and side.is_polynomial(*side.free_symbols) for side in sides):
        return False
    ratio = sympy.cancel(sides[0] / sides[1])
    return bool(ratio.is_number and ratio.is_nonzero)


def is_near(gold: Any, answer: Any, digits: int) -> bool:
    """Return False if a small number differs relatively; math-verify rounds it to zero."""
    import sympy

    if not all(isinstance(number, sympy.Expr) and number.is_number for number in (gold, answer)):
        return True
    exact = gold.evalf(30)
    answer_value = answer.evalf(30)
    if (
        not (exact.is_Float or exact.is_Rational)
        or not (answer_value.is_Float or answer_value.is_Rational)
        or abs(exact) >= SMALL
    ):
        return True
    return bool(
        abs(exact - answer_value)
        <= abs(exact) * sympy.Rational(str(math_text.relative_tolerance(digits)))
    )


def last_number(text: str) -> Node | None:
    numbers = _find_numbers(text)
    return read(numbers[-1]) if numbers and len(numbers[-1]) <= math_text.LONGEST_NUMBER else None


def only_number(text: str) -> Node | None:
    """Return the number of a sentence that holds one; None for a formula."""
    if "\\" in text or "=" in text or not re.search(r"[A-Za-z]{3}", text):
        return None
    numbers = _find_numbers(text)
    return read(numbers[0]) if len(numbers) == 1 else None


def _find_numbers(text: str) -> list[str]:
    return [
        match[0].strip().rstrip(",")
        for match in _LAST_NUMBER.finditer(text)
        if re.search(r"\d", match[0])
    ]
