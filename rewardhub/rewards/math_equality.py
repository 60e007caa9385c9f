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
        # Whether sympy raised in a comparison.
        self._has_failed = False
        self._num_pairs = 0

    def verdict(self, gold: Node, answer: Node) -> Literal["equal", "different", "failed"]:
        """Return the verdict on an answer.

        Raises:
            TooCostly: if an expression is too costly to compute with.
        """
        self._has_failed = False
        if self.is_equal(gold, answer):
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

    def is_equal(self, gold: Node, answer: Node) -> bool:
        """Return whether an answer equals the reference."""
        self._num_pairs += 1
        if self._num_pairs > MAX_PAIRS:
            raise TooCostly("too many items to compare")
        if gold.unit and answer.unit and gold.unit != answer.unit:
            return False
        if math_text.canonical(gold.text) == math_text.canonical(answer.text):
            return True
        if "words" in (gold.kind, answer.kind):
            return math_text.words(gold.text) == math_text.words(answer.text) != ""
        unwrapped = self._unwrapped(gold, answer)
        if unwrapped is not None:
            return self.is_equal(*unwrapped)
        same_kind = getattr(self, f"_same_{gold.kind}", None) if gold.kind == answer.kind else None
        if same_kind is not None:
            return bool(same_kind(gold, answer))
        mixed = self._mixed_kinds(gold, answer)
        return self._same_expression(gold, answer) if mixed is None else mixed

    def _unwrapped(self, gold: Node, answer: Node) -> tuple[Node, Node] | None:
        """Return both without a name that only one has; ``x = 3`` equals 3."""
        gold_value = _assigned_value(gold)
        found_value = _assigned_value(answer)
        if gold.kind == "relation" and answer.kind == "relation":
            if gold.label == answer.label == "\\in" and None not in (gold_value, found_value):
                return gold.parts[1], answer.parts[1]
            return None
        if gold_value is not None and answer.kind not in ("system", "congruence", "builder"):
            return gold_value, answer
        if answer.kind == "relation" and gold.kind not in ("system", "congruence", "builder"):
            if found_value is not None:
                return gold, found_value
            if set(answer.label.split()) == {"="} and gold.kind not in ("list", "set"):
                return gold, answer.parts[-1]
        return None

    def _mixed_kinds(self, gold: Node, answer: Node) -> bool | None:
        """Compare two different kinds; None if sympy decides."""
        kinds = {gold.kind, answer.kind}
        if kinds <= {"list", "set", "tuple", "system"}:
            if "tuple" in kinds:
                is_collection = "system" in kinds or ("set" in kinds and self._options.strict)
                return (
                    False
                    if is_collection
                    else self._same_items(gold.parts, answer.parts, ordered="set" not in kinds)
                )
            return self._same_items(
                gold.parts, answer.parts, ordered=_are_named_apart(gold, answer)
            )
        if kinds == {"tuple", "interval"}:  # of other brackets
            return False
        if kinds == {"list", "interval"} and gold.kind == "list":
            return answer.label == "[]" and self._same_items(gold.parts, answer.parts, ordered=True)
        if kinds == {"matrix", "tuple"}:
            matrix, row = (gold, answer) if gold.kind == "matrix" else (answer, gold)
            is_column = matrix.label.endswith("x1") and row.label == "()"
            return is_column and self._same_items(gold.parts, answer.parts, ordered=True)
        if kinds <= {"number", "percent", "ratio", "clock"}:
            return self._same_values(gold, answer)
        if "builder" in kinds:
            return self._is_built(gold, answer)
        if kinds <= _SYMBOLIC:
            return None
        return False

    def _same_values(self, gold: Node, answer: Node) -> bool:
        if gold.value is None or answer.value is None:
            return False
        digits = self._options.float_rounding
        exact = (gold.value, gold.is_decimal)
        values = [answer.value]
        # the sign may be the unit of the question
        if {gold.kind, answer.kind} == {"number", "percent"}:
            values.append(answer.value * 100 if answer.kind == "percent" else answer.value / 100)
        return any(
            math_text.same_number(exact, (value, answer.is_decimal), digits) for value in values
        )

    _same_number = _same_values
    _same_percent = _same_values

    def _same_ratio(self, gold: Node, answer: Node) -> bool:
        terms = [[part.value or 0 for part in node.parts] for node in (gold, answer)]
        return len(terms[0]) == len(terms[1]) and all(
            gold_term * terms[1][0] == answer_term * terms[0][0]
            for gold_term, answer_term in zip(*terms, strict=True)
        )

    def _same_clock(self, gold: Node, answer: Node) -> bool:
        times = [_possible_times(node) for node in (gold, answer)]
        return bool(times[0] & times[1])

    def _same_list(self, gold: Node, answer: Node) -> bool:
        return self._same_items(gold.parts, answer.parts, ordered=_are_named_apart(gold, answer))

    _same_set = _same_list
    _same_system = _same_list
    _same_cases = _same_list

    def _same_tuple(self, gold: Node, answer: Node) -> bool:
        return gold.label == answer.label and self._same_items(
            gold.parts, answer.parts, ordered=True
        )

    _same_interval = _same_tuple
    _same_matrix = _same_tuple

    def _same_items(self, gold: Sequence[Node], answer: Sequence[Node], *, ordered: bool) -> bool:
        if ordered:
            pairs = zip(gold, answer, strict=False)
            return len(gold) == len(answer) and all(
                self.is_equal(left_item, right_item) for left_item, right_item in pairs
            )
        gold_items = _distinct_nodes(gold)
        answer_items = _distinct_nodes(answer)
        texts = {math_text.canonical(node.text) for node in answer_items}
        missing = [node for node in gold_items if math_text.canonical(node.text) not in texts]
        texts = {math_text.canonical(node.text) for node in gold_items}
        extra = [node for node in answer_items if math_text.canonical(node.text) not in texts]
        # Equal items in two notations count once.
        return all(
            any(self.is_equal(left_item, right_item) for right_item in answer_items)
            for left_item in missing
        ) and all(
            any(self.is_equal(left_item, right_item) for left_item in gold_items)
            for right_item in extra
        )

    def _same_relation(self, gold: Node, answer: Node) -> bool:
        if gold.label == answer.label == "=" and not any(
            is_name(node.parts[0].text) for node in (gold, answer)
        ):
            return self._same_expression(gold, answer)
        if gold.label == answer.label and len(gold.parts) == len(answer.parts):
            names = [node.parts[0].text for node in (gold, answer)]
            if (
                all(map(is_name, names))
                and gold.label == "="
                and _other_variable(*names) is not None
            ):
                answer = msgspec.structs.replace(answer, parts=_with_name(answer, gold))
            if all(
                self.is_equal(gold_part, answer_part)
                for gold_part, answer_part in zip(gold.parts, answer.parts, strict=True)
            ):
                return True
            if gold.label == "\\ne":
                return self.is_equal(gold.parts[0], answer.parts[1]) and self.is_equal(
                    gold.parts[1], answer.parts[0]
                )
        last = [_assigned_value(node) for node in (gold, answer)]
        if (
            None not in last
            and gold.parts[0].text == answer.parts[0].text
            and "\\in" not in gold.label + answer.label
        ):
            return self.is_equal(gold.parts[-1], answer.parts[-1])
        return self._same_expression(gold, answer)

    def _same_congruence(self, gold: Node, answer: Node) -> bool:
        if not self.is_equal(gold.parts[0], answer.parts[0]):
            return False
        if gold.label != answer.label and gold.label and answer.label:
            return False
        modulus = gold.parts[0].value
        residues = [[part.value for part in node.parts[1:]] for node in (gold, answer)]
        if modulus and all(value is not None for values in residues for value in values):
            first, second = (
                {value % modulus for value in values if value is not None} for values in residues
            )
            return first == second
        return self._same_items(gold.parts[1:], answer.parts[1:], ordered=False)

    def _same_builder(self, gold: Node, answer: Node) -> bool:
        names = [re.match(r"[A-Za-z]", node.parts[0].text) for node in (gold, answer)]
        parts = answer.parts
        if names[0] and names[1]:
            parts = tuple(_rename_variable(part, names[1][0], names[0][0]) for part in answer.parts)
        return self._same_items(gold.parts, parts, ordered=True)

    def _is_built(self, gold: Node, answer: Node) -> bool:
        """Compare a set given by a condition with an interval or another set."""
        if gold.kind == "builder":
            return gold.parts[1].kind == "relation" and self.is_equal(gold.parts[1], answer)
        condition = answer.parts[1]
        if condition.kind != "relation":
            return False
        return self._same_expression(gold, condition, allow_set_relation_comp=True)

    def _same_expression(
        self, gold: Node, answer: Node, *, allow_set_relation_comp: bool | None = None
    ) -> bool:
        import math_verify

        if not {gold.kind, answer.kind} <= _SYMBOLIC:
            return False
        exact = math_expression.parsed(gold, imaginary=self._imaginary)
        answer_expression = math_expression.parsed(answer, imaginary=self._imaginary)
        if exact is None or answer_expression is None:
            return False
        try:
            if math_expression.is_undefined(exact) or math_expression.is_undefined(
                answer_expression
            ):
                return False
            if exact == answer_expression:
                return True
            if is_costly(exact) or is_costly(answer_expression):
                raise TooCostly("too large to compute with")
            if math_expression.ordered(exact) == math_expression.ordered(answer_expression):
                return True
            if math_expression.is_same_equation(exact, answer_expression):
                return True
            if not math_expression.is_near(exact, answer_expression, self._options.float_rounding):
                return False
            settings = msgspec.structs.asdict(self._options)
            if allow_set_relation_comp is not None:
                settings["allow_set_relation_comp"] = allow_set_relation_comp
            return bool(
                math_verify.verify(
                    exact, answer_expression, timeout_seconds=None, raise_on_error=True, **settings
                )
            )
        except (TooCostly, MemoryError, RecursionError):
            raise
        except Exception:  # noqa: BLE001 - sympy raises any exception
            self._has_failed = True
            return False


def _assigned_value(node: Node) -> Node | None:
    """Return what a name equals or is an element of: the last side; None without a name."""
    signs = node.label.split()
    if node.kind != "relation" or not is_name(node.parts[0].text) or set(signs) - {"=", "\\in"}:
        return None
    return node.parts[-1] if len(set(signs)) == 1 or signs[-1] == "\\in" else None


def _are_named_apart(gold: Node, answer: Node) -> bool:
    """Return whether only the reference names its values, so that their order counts."""
    names = [part.parts[0].text for part in gold.parts if part.kind == "relation" and part.parts]
    return len(set(names)) == len(gold.parts) > 1 and not any(
        part.kind == "relation" for part in answer.parts
    )


def _distinct_nodes(nodes: Sequence[Node]) -> list[Node]:
    return list({math_text.canonical(node.text): node for node in nodes}.values())


def _possible_times(node: Node) -> set[tuple[int, int, int]]:
    """Return the times of the day that a clock may show, as hour, minute and second."""
    hour, minute, second = (int(part.value or 0) for part in node.parts)
    if node.label:
        return {(hour % 12 + (12 if node.label == "p" else 0), minute, second)}
    hours = {hour, (hour + 12) % 24} if hour <= 12 else {hour}
    return {(hour, minute, second) for hour in hours}


def _other_variable(gold: str, answer: str) -> str | None:
    """Return the other variable of a function: ``y`` for ``f(x)`` and ``f(y)``; else None."""
    pattern = r"([A-Za-z])\(\s*([A-Za-z])\s*\)"
    matches = re.fullmatch(pattern, gold), re.fullmatch(pattern, answer)
    if (
        matches[0] is None
        or matches[1] is None
        or matches[0][1] != matches[1][1]
        or matches[0][2] == matches[1][2]
    ):
        return None
    return matches[1][2]


def _with_name(answer: Node, gold: Node) -> tuple[Node, ...]:
    new_name = re.findall(r"[A-Za-z]", gold.parts[0].text)[-1]
    name = re.findall(r"[A-Za-z]", answer.parts[0].text)[-1]
    return tuple(_rename_variable(part, name, new_name) for part in answer.parts)


def _rename_variable(node: Node, name: str, new_name: str) -> Node:
    """Return a node with one variable renamed."""
    pattern = re.compile(rf"(?<![A-Za-z\\]){name}(?![A-Za-z])")
    parts = tuple(_rename_variable(part, name, new_name) for part in node.parts)
    return msgspec.structs.replace(node, text=pattern.sub(new_name, node.text), parts=parts)
