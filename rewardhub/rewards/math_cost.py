"""Decides from an expression's shape whether it is too costly to compute with. Pure."""

from __future__ import annotations

import math
import re
from typing import Any, Final

MAX_CHARS: Final = 2000  # of one formula
MAX_NESTING: Final = 20  # nested brackets, in the text
MAX_DIGIT_RUN: Final = 1000  # digits of one number, in the text
MAX_NODES: Final = 600
MAX_DEPTH: Final = 40
MAX_DIGITS: Final = 20_000  # of a number that an evaluation would produce
MAX_TERMS: Final = 2000  # of a sum that expanding products and powers would produce
# applications of sin, log, exp and others; simplification tries many combinations of them
MAX_FUNCTIONS: Final = 12
MAX_FUNCTION_DEPTH: Final = 6  # of nested functions
_FUNCTIONS: Final = re.compile(r"\\(?:arc|a)?(?:sin|cos|tan|cot|sec|csc|log|ln|exp|lg)")
_OPEN = "([{"
_CLOSE = ")]}"


def is_costly_text(text: str) -> bool:
    """Return whether a formula is too costly to parse."""
    depth = digits = 0
    for char in text:
        depth += (char in _OPEN) - (char in _CLOSE)
        digits = digits + 1 if char.isdigit() else 0
        if depth > MAX_NESTING or digits > MAX_DIGIT_RUN:
            return True
    return len(_FUNCTIONS.findall(text)) > MAX_FUNCTIONS


def is_costly(expression: Any) -> bool:
    """Return whether evaluating, simplifying or comparing an expression may take very long.

    False is not a guarantee, so computing is bounded as well.
    """
    import sympy

    nodes = functions = 0
    stack = [(expression, 0, 0)]
    while stack:
        node, depth, within = stack.pop()
        nodes += 1
        if isinstance(node, sympy.Function) and not isinstance(
            node, (sympy.Abs, sympy.factorial, sympy.binomial)
        ):
            functions = functions + 1
            within = within + 1
        if (
            nodes > MAX_NODES
            or depth > MAX_DEPTH
            or functions > MAX_FUNCTIONS
            or within > MAX_FUNCTION_DEPTH
        ):
            return True
        stack += [(child, depth + 1, within) for child in _child_nodes(node)]
    return _max_digits(expression) > MAX_DIGITS or _num_terms(expression) > MAX_TERMS


def _child_nodes(node: Any) -> list[Any]:
    # A matrix, whose args are not its elements.
    if hasattr(node, "flat"):
        return list(node.flat())
    return list(getattr(node, "args", ()))


def _max_digits(node: Any) -> float:
    """Return an upper bound of the digits of any number in an evaluation; symbols are small."""
    return max(0.0, _abs_log10(node), *(_max_digits(child) for child in _child_nodes(node)))


def _abs_log10(node: Any) -> float:
    """Return about log10 of an expression's absolute value, at least 0; infinity if too large."""
    import sympy

    if isinstance(node, sympy.Rational):
        return max(_int_log10(int(node.p)), _int_log10(int(node.q)))
    if isinstance(node, sympy.Number):
        return (
            max(0.0, math.log10(abs(float(node))))
            if node.is_finite and abs(float(node)) > 0
            else 0.0
        )
    children = [_abs_log10(child) for child in _child_nodes(node)]
    if isinstance(node, sympy.Pow):
        return children[0] * _from_log10(children[1]) if children[0] else 0.0  # not 0 * infinity
    if isinstance(node, sympy.exp):
        return 0.44 * _from_log10(children[0])
    if isinstance(
        node,
        (
            sympy.factorial,
            sympy.factorial2,
            sympy.RisingFactorial,
            sympy.FallingFactorial,
            sympy.gamma,
        ),
    ):
        size = _from_log10(max(children))
        return size * math.log10(size + 1)
    if isinstance(node, sympy.binomial):
        return 0.31 * _from_log10(children[0])
    if isinstance(node, sympy.Product):
        return max(children) * _from_log10(max(children[1:]))
    if isinstance(node, sympy.Mul):
        return sum(children)
    return max(children, default=0.0) + (
        math.log10(len(children)) if isinstance(node, sympy.Add) else 0.0
    )


def _int_log10(value: int) -> float:
    return math.log10(abs(value)) if value else 0.0


def _from_log10(log10: float) -> float:
    return 10.0**log10 if log10 < 300 else math.inf


def _num_terms(node: Any) -> float:
    """Return how many terms an expression has after expanding, at least 1."""
    import sympy

    children = [_num_terms(child) for child in _child_nodes(node)]
    if isinstance(node, sympy.Add):
        return sum(children)
    if isinstance(node, sympy.Mul):
        return math.prod(children)
    if isinstance(node, sympy.Pow) and isinstance(node.exp, sympy.Integer) and children[0] > 1:
        power = min(abs(int(node.exp)), 10**6)
        terms = int(min(children[0], 50))
        return float(math.comb(power + terms - 1, terms - 1)) if node.base.free_symbols else 1.0
    return max(children, default=1.0)
