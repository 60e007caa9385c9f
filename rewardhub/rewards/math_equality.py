"""Decides whether two answers are equal, by their structures."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final, Literal

import msgspec

from rewardhub.bounded import TooCostly
from rewardhub.rewards import math_expression, math_text
from rewardhub.rewards.math_cost import is_costly
from rewardhub.rewards.math_read import Node, is_name

# Kinds that sympy can compare with each other; the others equal only their own kind.
_SYMBOLIC: Final = frozenset(
    (
        "number",
        "percent",
        "ratio",
        "list",
        "set",
        "tuple",
        "interval",
        "matrix",
        "relation",
        "expression",
    )
)
_UNORDERED: Final = ("list", "set", "system")
MAX_PAIRS: Final = 4000  # of items that are compared with each other


class ComparisonOptions(msgspec.Struct, frozen=True):
    """Options of the comparison, by math-verify's names."""

    float_rounding: int
    numeric_precision: int
    strict: bool
    allow_set_relation_comp: bool


class NodeComparison:
    """Compares answers with one reference.

    Args:
        options: of math-verify.
        gold: the reference, which decides what ``i`` means.
    """

    def __init__(self, options: ComparisonOptions, gold: str) -> None:
        self._options = options
        self._imaginary = math_expression.is_imaginary(gold)
        self._has_failed = False  # whether sympy raised in a comparison
        self._num_pairs = 0

    def verdict(self, gold: Node, found: Node) -> Literal["equal", "different", "failed"]:
        """Return the verdict on an answer.

        Raises:
            TooCostly: if an expression is too costly to compute with.
        """
        self._has_failed = False
        if self.is_equal(gold, found):
            return "equal"
        return "failed" if self._has_failed else "different"

    def is_mathematics(self, node: Node) -> bool:
        """Return whether a reference can be compared as mathematics; else it is a text."""
        if node.kind == "words":
            return False
        if node.kind == "expression" or (node.kind == "relation" and not node.parts):
            return math_expression.parsed(node, imaginary=self._imaginary) is not None
        if node.kind in ("list", "set", "tuple", "interval"):
            return any(self.is_mathematics(part) for part in node.parts)
        return True

    def is_equal(self, gold: Node, found: Node) -> bool:
        """Return whether an answer equals the reference."""
        self._num_pairs += 1
        if self._num_pairs > MAX_PAIRS:
            raise TooCostly("too many items to compare")
        if gold.unit and found.unit and gold.unit != found.unit:
            return False
        if math_text.canonical(gold.text) == math_text.canonical(found.text):
            return True
        if "words" in (gold.kind, found.kind):
            return math_text.words(gold.text) == math_text.words(found.text) != ""
        unwrapped = self._unwrapped(gold, found)
        if unwrapped is not None:
            return self.is_equal(*unwrapped)
        same_kind = getattr(self, f"_same_{gold.kind}", None) if gold.kind == found.kind else None
        if same_kind is not None:
            return bool(same_kind(gold, found))
        mixed = self._mixed_kinds(gold, found)
        return self._same_expression(gold, found) if mixed is None else mixed

    def _unwrapped(self, gold: Node, found: Node) -> tuple[Node, Node] | None:
        """Return both without the name of what is equal, where only one has it; ``x = 3`` equals 3."""
        gold_value = _assigned(gold)
        found_value = _assigned(found)
        if gold.kind == "relation" and found.kind == "relation":
            if gold.label == found.label == "\\in" and None not in (gold_value, found_value):
                return gold.parts[1], found.parts[1]
            return None
        if gold_value is not None and found.kind not in ("system", "congruence", "builder"):
            return gold_value, found
        if found.kind == "relation" and gold.kind not in ("system", "congruence", "builder"):
            if found_value is not None:
                return gold, found_value
            if set(found.label.split()) == {"="} and gold.kind not in ("list", "set"):
                return gold, found.parts[-1]
        return None

    def _mixed_kinds(self, gold: Node, found: Node) -> bool | None:
        """Compare two different kinds; None if sympy decides."""
        kinds = {gold.kind, found.kind}
        if kinds <= {"list", "set", "tuple", "system"}:
            if "tuple" in kinds:
                named = "system" in kinds or ("set" in kinds and self._options.strict)
                return (
                    False
                    if named
                    else self._same_items(gold.parts, found.parts, ordered="set" not in kinds)
                )
            return self._same_items(gold.parts, found.parts, ordered=_are_named_apart(gold, found))
        if kinds == {"tuple", "interval"}:  # of other brackets
            return False
        if kinds == {"list", "interval"} and gold.kind == "list":
            return found.label == "[]" and self._same_items(gold.parts, found.parts, ordered=True)
        if kinds == {"matrix", "tuple"}:
            matrix, row = (gold, found) if gold.kind == "matrix" else (found, gold)
            is_column = matrix.label.endswith("x1") and row.label == "()"
            return is_column and self._same_items(gold.parts, found.parts, ordered=True)
        if kinds <= {"number", "percent", "ratio", "clock"}:
            return self._same_values(gold, found)
        if "builder" in kinds:
            return self._is_built(gold, found)
        if kinds <= _SYMBOLIC:
            return None
        return False

    def _same_values(self, gold: Node, found: Node) -> bool:
        if gold.value is None or found.value is None:
            return False
        digits = self._options.float_rounding
        exact = (gold.value, gold.is_decimal)
        values = [found.value]
        # the sign may be the unit of the question
        if {gold.kind, found.kind} == {"number", "percent"}:
            values.append(found.value * 100 if found.kind == "percent" else found.value / 100)
        return any(
            math_text.same_number(exact, (value, found.is_decimal), digits) for value in values
        )

    _same_number = _same_values
    _same_percent = _same_values

    def _same_ratio(self, gold: Node, found: Node) -> bool:
        terms = [[part.value or 0 for part in node.parts] for node in (gold, found)]
        return len(terms[0]) == len(terms[1]) and all(
            one * terms[1][0] == other * terms[0][0] for one, other in zip(*terms, strict=True)
        )

    def _same_clock(self, gold: Node, found: Node) -> bool:
        times = [_times(node) for node in (gold, found)]
        return bool(times[0] & times[1])

    def _same_list(self, gold: Node, found: Node) -> bool:
        return self._same_items(gold.parts, found.parts, ordered=_are_named_apart(gold, found))

    _same_set = _same_list
    _same_system = _same_list
    _same_cases = _same_list

    def _same_tuple(self, gold: Node, found: Node) -> bool:
        return gold.label == found.label and self._same_items(gold.parts, found.parts, ordered=True)

    _same_interval = _same_tuple
    _same_matrix = _same_tuple

    def _same_items(self, gold: Sequence[Node], found: Sequence[Node], *, ordered: bool) -> bool:
        if ordered:
            pairs = zip(gold, found, strict=False)
            return len(gold) == len(found) and all(
                self.is_equal(one, other) for one, other in pairs
            )
        wanted = _distinct(gold)
        others = _distinct(found)
        texts = {math_text.canonical(node.text) for node in others}
        missing = [node for node in wanted if math_text.canonical(node.text) not in texts]
        texts = {math_text.canonical(node.text) for node in wanted}
        extra = [node for node in others if math_text.canonical(node.text) not in texts]
        # Equal items in two notations count once.
        return all(any(self.is_equal(one, other) for other in others) for one in missing) and all(
            any(self.is_equal(one, other) for one in wanted) for other in extra
        )

    def _same_relation(self, gold: Node, found: Node) -> bool:
        if gold.label == found.label == "=" and not any(
            is_name(node.parts[0].text) for node in (gold, found)
        ):
            return self._same_expression(gold, found)
        if gold.label == found.label and len(gold.parts) == len(found.parts):
            names = [node.parts[0].text for node in (gold, found)]
            if all(map(is_name, names)) and gold.label == "=" and _renamed(*names) is not None:
                found = msgspec.structs.replace(found, parts=_with_name(found, gold))
            if all(
                self.is_equal(one, other)
                for one, other in zip(gold.parts, found.parts, strict=True)
            ):
                return True
            if gold.label == "\\ne":
                return self.is_equal(gold.parts[0], found.parts[1]) and self.is_equal(
                    gold.parts[1], found.parts[0]
                )
        last = [_assigned(node) for node in (gold, found)]
        if (
            None not in last
            and gold.parts[0].text == found.parts[0].text
            and "\\in" not in gold.label + found.label
        ):
            return self.is_equal(gold.parts[-1], found.parts[-1])
        return self._same_expression(gold, found)

    def _same_congruence(self, gold: Node, found: Node) -> bool:
        if not self.is_equal(gold.parts[0], found.parts[0]):
            return False
        if gold.label != found.label and gold.label and found.label:
            return False
        modulus = gold.parts[0].value
        residues = [[part.value for part in node.parts[1:]] for node in (gold, found)]
        if modulus and all(value is not None for values in residues for value in values):
            first, second = (
                {value % modulus for value in values if value is not None} for values in residues
            )
            return first == second
        return self._same_items(gold.parts[1:], found.parts[1:], ordered=False)

    def _same_builder(self, gold: Node, found: Node) -> bool:
        names = [re.match(r"[A-Za-z]", node.parts[0].text) for node in (gold, found)]
        parts = found.parts
        if names[0] and names[1]:
            parts = tuple(_substituted(part, names[1][0], names[0][0]) for part in found.parts)
        return self._same_items(gold.parts, parts, ordered=True)

    def _is_built(self, gold: Node, found: Node) -> bool:
        """Compare a set given by a condition with an interval or another set."""
        if gold.kind == "builder":
            return gold.parts[1].kind == "relation" and self.is_equal(gold.parts[1], found)
        condition = found.parts[1]
        if condition.kind != "relation":
            return False
        return self._same_expression(gold, condition, allow_set_relation_comp=True)

    def _same_expression(
        self, gold: Node, found: Node, *, allow_set_relation_comp: bool | None = None
    ) -> bool:
        import math_verify

        if not {gold.kind, found.kind} <= _SYMBOLIC:
            return False
        exact = math_expression.parsed(gold, imaginary=self._imaginary)
        other = math_expression.parsed(found, imaginary=self._imaginary)
        if exact is None or other is None:
            return False
        try:
            if math_expression.is_undefined(exact) or math_expression.is_undefined(other):
                return False
            if exact == other:
                return True
            if is_costly(exact) or is_costly(other):
                raise TooCostly("too large to compute with")
            if math_expression.ordered(exact) == math_expression.ordered(other):
                return True
            if math_expression.is_same_equation(exact, other):
                return True
            if not math_expression.is_near(exact, other, self._options.float_rounding):
                return False
            settings = msgspec.structs.asdict(self._options)
            if allow_set_relation_comp is not None:
                settings["allow_set_relation_comp"] = allow_set_relation_comp
            return bool(
                math_verify.verify(
                    exact, other, timeout_seconds=None, raise_on_error=True, **settings
                )
            )
        except (TooCostly, MemoryError, RecursionError):
            raise
        except Exception:  # noqa: BLE001 - sympy raises any exception
            self._has_failed = True
            return False


def _assigned(node: Node) -> Node | None:
    """Return what a name is equal to or an element of, as its last side says; None without a name."""
    signs = node.label.split()
    if node.kind != "relation" or not is_name(node.parts[0].text) or set(signs) - {"=", "\\in"}:
        return None
    return node.parts[-1] if len(set(signs)) == 1 or signs[-1] == "\\in" else None


def _are_named_apart(gold: Node, found: Node) -> bool:
    """Return whether the reference names its values and the answer does not, so that their order
    counts.
    """
    names = [part.parts[0].text for part in gold.parts if part.kind == "relation" and part.parts]
    return len(set(names)) == len(gold.parts) > 1 and not any(
        part.kind == "relation" for part in found.parts
    )


def _distinct(nodes: Sequence[Node]) -> list[Node]:
    return list({math_text.canonical(node.text): node for node in nodes}.values())


def _times(node: Node) -> set[tuple[int, int, int]]:
    """Return the times of the day that a clock may show, as hour, minute and second."""
    hour, minute, second = (int(part.value or 0) for part in node.parts)
    if node.label:
        return {(hour % 12 + (12 if node.label == "p" else 0), minute, second)}
    hours = {hour, (hour + 12) % 24} if hour <= 12 else {hour}
    return {(each, minute, second) for each in hours}


def _renamed(gold: str, found: str) -> str | None:
    """Return the other variable of the same function, ``y`` for ``f(x)`` and ``f(y)``; None for
    other names.
    """
    pattern = r"([A-Za-z])\(\s*([A-Za-z])\s*\)"
    matches = re.fullmatch(pattern, gold), re.fullmatch(pattern, found)
    if (
        matches[0] is None
        or matches[1] is None
        or matches[0][1] != matches[1][1]
        or matches[0][2] == matches[1][2]
    ):
        return None
    return matches[1][2]


def _with_name(found: Node, gold: Node) -> tuple[Node, ...]:
    wanted = re.findall(r"[A-Za-z]", gold.parts[0].text)[-1]
    name = re.findall(r"[A-Za-z]", found.parts[0].text)[-1]
    return tuple(_substituted(part, name, wanted) for part in found.parts)


def _substituted(node: Node, name: str, wanted: str) -> Node:
    """Return a node with one variable renamed."""
    pattern = re.compile(rf"(?<![A-Za-z\\]){name}(?![A-Za-z])")
    parts = tuple(_substituted(part, name, wanted) for part in node.parts)
    return msgspec.structs.replace(node, text=pattern.sub(wanted, node.text), parts=parts)
