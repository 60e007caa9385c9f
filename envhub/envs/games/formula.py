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
    """Return the value of a formula of whole numbers, ``+ - * /`` and brackets.

    Raises:
        FormulaError: if it is not a formula; adjacent numbers and signs before a number are not
            allowed.
    """
    stack = list(reversed(units))
    value = _parse_sum(stack)
    if stack:
        raise FormulaError(f"{stack[-1]!r} where the formula should end")
    return value


def _parse_sum(stack: list[str]) -> Fraction:
    value = _parse_product(stack)
    while stack and stack[-1] in ("+", "-"):
        value = (
            value + _parse_product(stack) if stack.pop() == "+" else value - _parse_product(stack)
        )
    return value


def _parse_product(stack: list[str]) -> Fraction:
    value = _parse_number(stack)
    while stack and stack[-1] in ("*", "/"):
        is_product = stack.pop() == "*"
        factor = _parse_number(stack)
        if not is_product and factor == 0:
            raise FormulaError("division by zero")
        value = value * factor if is_product else value / factor
    return value


def _parse_number(stack: list[str]) -> Fraction:
    unit = stack.pop() if stack else "the end"
    if unit == "(":
        value = _parse_sum(stack)
        if not stack or stack.pop() != ")":
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
    for tree in _search_trees(
        tuple((float(number), str(number)) for number in numbers), target, operators
    ):
        units = _tree_units(tree)
        # the search uses floating-point numbers, which is much faster
        if evaluate(units) == target:
            return units
    return None


def _search_trees(
    parts: tuple[tuple[float, Tree], ...], target: int, operators: str
) -> Iterator[Tree]:
    if len(parts) == 1:
        if abs(parts[0][0] - target) < 1e-9:
            yield parts[0][1]
        return
    for first, second in permutations(range(len(parts)), 2):
        other_parts = tuple(
            part for place, part in enumerate(parts) if place not in (first, second)
        )
        left_value, left_tree = parts[first]
        right_value, right_tree = parts[second]
        for operator in operators:
            if (operator in "+*" and first > second) or (
                operator == "/" and abs(right_value) < 1e-9
            ):
                # a commuted duplicate, or a division by zero
                continue
            value = OPERATIONS[operator](left_value, right_value)
            yield from _search_trees(
                (*other_parts, (value, (left_tree, operator, right_tree))), target, operators
            )


def _tree_units(tree: Tree) -> Units:
    """Return the units of a formula, with necessary brackets only, as its length is limited."""
    if isinstance(tree, str):
        return (tree,)
    left_tree, operator, right_tree = tree
    is_left_weak = not isinstance(left_tree, str) and left_tree[1] in "+-" and operator in "*/"
    loose_right = {"+": "", "-": "+-", "*": "+-", "/": "+-*/"}[operator]
    is_right_weak = not isinstance(right_tree, str) and right_tree[1] in loose_right
    return (
        *_bracket_units(left_tree, is_left_weak),
        operator,
        *_bracket_units(right_tree, is_right_weak),
    )


def _bracket_units(tree: Tree, is_needed: bool) -> Units:
    units = _tree_units(tree)
    return ("(", *units, ")") if is_needed else units
