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
    rest = list(reversed(units))
    value = _sum(rest)
    if rest:
        raise FormulaError(f"{rest[-1]!r} where the formula should end")
    return value


def _sum(rest: list[str]) -> Fraction:
    value = _product(rest)
    while rest and rest[-1] in ("+", "-"):
        value = value + _product(rest) if rest.pop() == "+" else value - _product(rest)
    return value


def _product(rest: list[str]) -> Fraction:
    value = _number(rest)
    while rest and rest[-1] in ("*", "/"):
        times = rest.pop() == "*"
        other = _number(rest)
        if not times and other == 0:
            raise FormulaError("division by zero")
        value = value * other if times else value / other
    return value


def _number(rest: list[str]) -> Fraction:
    unit = rest.pop() if rest else "the end"
    if unit == "(":
        value = _sum(rest)
        if not rest or rest.pop() != ")":
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
        others = tuple(part for place, part in enumerate(parts) if place not in (first, second))
        (one, left), (two, right) = parts[first], parts[second]
        for operator in operators:
            if (operator in "+*" and first > second) or (operator == "/" and abs(two) < 1e-9):
                continue  # a commuted duplicate, or a division by zero
            value = OPERATIONS[operator](one, two)
            yield from _trees((*others, (value, (left, operator, right))), target, operators)


def _written(tree: Tree) -> Units:
    """Return the units of a formula with the necessary brackets only, as the length of a formula is
    limited.
    """
    if isinstance(tree, str):
        return (tree,)
    left, operator, right = tree
    weak_left = not isinstance(left, str) and left[1] in "+-" and operator in "*/"
    loose_right = {"+": "", "-": "+-", "*": "+-", "/": "+-*/"}[operator]
    weak_right = not isinstance(right, str) and right[1] in loose_right
    return (*_bracketed(left, weak_left), operator, *_bracketed(right, weak_right))


def _bracketed(tree: Tree, needed: bool) -> Units:
    return ("(", *_written(tree), ")") if needed else _written(tree)
