"""Evaluates formulas over a few numbers exactly, and finds one that reaches a target."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import permutations
from operator import add, mul, sub, truediv
from typing import Any, Final

Units = tuple[str, ...]  # numbers, operators and brackets, one each
Tree = Any  # a number as text, or (tree, operator, tree)
OPERATIONS: Final[dict[str, Callable[[float, float], float]]] = {
    "+": add,
    "-": sub,
    "*": mul,
    "/": truediv,
}


class FormulaError(ValueError):
    """The units are not a formula, or it divides by zero."""


def evaluate(units: Sequence[str]) -> Fraction:
    """Return the value of a formula of whole numbers, ``+ - * /`` and brackets, multiplication
    first.

    Raises:
        FormulaError: if it is not a formula; adjacent numbers and signs before a number are not
            allowed.
    """
    remaining = list(reversed(units))
    value = _sum(remaining)
    if remaining:
        raise FormulaError(f"{remaining[-1]!r} where the formula should end")
    return value


def _sum(remaining: list[str]) -> Fraction:
    value = _product(remaining)
    while remaining and remaining[-1] in ("+", "-"):
        value = (
            value + _product(remaining) if remaining.pop() == "+" else value - _product(remaining)
        )
    return value


def _product(remaining: list[str]) -> Fraction:
    value = _number(remaining)
    while remaining and remaining[-1] in ("*", "/"):
        times = remaining.pop() == "*"
        factor = _number(remaining)
        if not times and factor == 0:
            raise FormulaError("division by zero")
        value = value * factor if times else value / factor
    return value


def _number(remaining: list[str]) -> Fraction:
    unit = remaining.pop() if remaining else "the end"
    if unit == "(":
        value = _sum(remaining)
        if not remaining or remaining.pop() != ")":
            raise FormulaError("a bracket that is not closed")
        return value
    if not unit.isdecimal():
        raise FormulaError(f"{unit!r} where a number should stand")
    return Fraction(int(unit))


@lru_cache(maxsize=65_536)
def reach(numbers: tuple[int, ...], target: int, operators: str) -> Units | None:
    """Return a formula that uses each number once and gives the target, None if there is none.

    Args:
        numbers: sorted, so that hands of the same cards share an answer.
        operators: those that may be used, for example ``+-*/``.
    """
    for tree in _trees(
        tuple((float(number), str(number)) for number in numbers), target, operators
    ):
        units = _written(tree)
        # the search uses floating-point numbers, which is much faster
        if evaluate(units) == target:
            return units
    return None


def _trees(parts: tuple[tuple[float, Tree], ...], target: int, operators: str) -> Iterator[Tree]:
    if len(parts) == 1:
        if abs(parts[0][0] - target) < 1e-9:
            yield parts[0][1]
        return
    for first, second in permutations(range(len(parts)), 2):
        other_parts = tuple(
            part for place, part in enumerate(parts) if place not in (first, second)
        )
        (first_value, left_tree), (two, right) = parts[first], parts[second]
        for operator in operators:
            if (operator in "+*" and first > second) or (operator == "/" and abs(two) < 1e-9):
                continue  # a commuted duplicate, or a division by zero
            value = OPERATIONS[operator](first_value, two)
            yield from _trees(
                (*other_parts, (value, (left_tree, operator, right))), target, operators
            )


def _written(tree: Tree) -> Units:
    """Return the units of a formula with the necessary brackets only, as the length of a formula is
    limited.
    """
    if isinstance(tree, str):
        return (tree,)
    left_tree, operator, right = tree
    weak_left = not isinstance(left_tree, str) and left_tree[1] in "+-" and operator in "*/"
    loose_right = {"+": "", "-": "+-", "*": "+-", "/": "+-*/"}[operator]
    weak_right = not isinstance(right, str) and right[1] in loose_right
    return (*_bracketed(left_tree, weak_left), operator, *_bracketed(right, weak_right))


def _bracketed(tree: Tree, needed: bool) -> Units:
    return ("(", *_written(tree), ")") if needed else _written(tree)
