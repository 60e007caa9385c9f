"""Evaluates the part of PromQL that our alerts and dashboards use, on scrapes; Prometheus itself
need not be there.

It has selectors with ``=``, ``=~``, ``!=``; ``increase``, ``delta``, ``rate``, ``changes`` and
``min_over_time``; ``sum``, ``max`` and ``min by``; ``+ - * /``, comparisons and ``and on``. Ranges
are not extrapolated.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

Labels = tuple[tuple[str, str], ...]
Vector = dict[Labels, float]
Series = dict[str, Vector]  # by name

TOKEN = re.compile(
    r'\s*(?:(\d+(?:\.\d+)?)(?![\w.])|([a-zA-Z_:][\w:]*)|("(?:[^"\\]|\\.)*")|(==|!=|>=|<=|=~|[-+*/<>=(){}\[\],])|(\d+[smhd]))'
)
UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
COMPARE: dict[str, Callable[[float, float], bool]] = {
    "==": lambda a, b: a == b, "!=": lambda a, b: a != b, ">": lambda a, b: a > b,
    "<": lambda a, b: a < b, ">=": lambda a, b: a >= b, "<=": lambda a, b: a <= b,
}  # fmt: skip
ARITHMETIC: dict[str, Callable[[float, float], float]] = {
    "*": lambda a, b: a * b, "/": lambda a, b: a / b if b else float("nan"),
    "+": lambda a, b: a + b, "-": lambda a, b: a - b,
}  # fmt: skip


def parse_scrape(text: str) -> Series:
    """Return the samples of a scrape."""
    found: Series = {}
    for family in text_string_to_metric_families(text):
        for one in family.samples:
            found.setdefault(one.name, {})[tuple(sorted(one.labels.items()))] = one.value
    return found


def names_in(expression: str) -> set[str]:
    """Return the metrics that an expression names."""
    return {name for name in re.findall(r"\brlearner_\w+", re.sub(r"\{[^}]*\}", "", expression))}


@dataclass
class History:
    """Scrapes with their times, oldest first."""

    scrapes: list[tuple[float, Series]]

    @property
    def now(self) -> float:
        return self.scrapes[-1][0]

    def instant(self, name: str) -> Vector:
        return dict(self.scrapes[-1][1].get(name, {}))

    def over(self, name: str, range_s: float) -> dict[Labels, list[float]]:
        """Return the values of each series within a time before the newest scrape."""
        found: dict[Labels, list[float]] = {}
        for at, series in self.scrapes:
            if at >= self.now - range_s:
                for labels, value in series.get(name, {}).items():
                    found.setdefault(labels, []).append(value)
        return found


def evaluate(expression: str, history: History) -> Vector:
    """Return the series for which an expression has a value: for an alert, those that it fires for."""
    parser = _Parser(list(_tokens(expression)), history)
    result = parser.conjunction()
    assert parser.done, f"{expression}: not understood from {parser.rest}"
    assert isinstance(result, dict)
    return result


def _tokens(text: str) -> Iterator[str]:
    at = 0
    while at < len(text.rstrip()):
        found = TOKEN.match(text, at)
        assert found, f"not understood: {text[at:]!r}"
        yield found[0].strip()
        at = found.end()


def _increase(values: list[float]) -> float:
    return sum(b - a if b >= a else b for a, b in itertools.pairwise(values))


def _only(labels: Labels, names: list[str] | None) -> Labels:
    return labels if names is None else tuple(pair for pair in labels if pair[0] in names)


class _Parser:
    def __init__(self, tokens: list[str], history: History) -> None:
        self._tokens, self._at, self._history = tokens, 0, history

    @property
    def done(self) -> bool:
        return self._at == len(self._tokens)

    @property
    def rest(self) -> str:
        return " ".join(self._tokens[self._at :])

    def _peek(self) -> str:
        return self._tokens[self._at] if not self.done else ""

    def _take(self, expected: str = "") -> str:
        token = self._peek()
        assert token, "the expression ends too soon"
        assert not expected or token == expected, f"expected {expected}: {self.rest}"
        self._at += 1
        return token

    def conjunction(self) -> Any:
        left = self._comparison()
        while self._peek() == "and":
            self._take()
            names = self._labels() if self._peek() == "on" and self._take() else None
            right = self._comparison()
            keys = {_only(labels, names) for labels in right}
            left = {labels: value for labels, value in left.items() if _only(labels, names) in keys}
        return left

    def _comparison(self) -> Any:
        left = self._sum()
        while self._peek() in COMPARE:
            holds = COMPARE[self._take()]
            right = self._sum()
            pairs = self._pairs(left, right)
            left = {labels: a for labels, (a, b) in pairs.items() if holds(a, b)}
        return left

    def _sum(self) -> Any:
        return self._binary(self._product, "+-")

    def _product(self) -> Any:
        return self._binary(self._term, "*/")

    def _binary(self, operand: Callable[[], Any], operators: str) -> Any:
        left = operand()
        while (operator := self._peek()) and operator in operators:
            self._take()
            right, work = operand(), ARITHMETIC[operator]
            if isinstance(left, float) and isinstance(right, float):
                left = work(left, right)
            else:
                left = {labels: work(a, b) for labels, (a, b) in self._pairs(left, right).items()}
        return left

    def _pairs(self, left: Any, right: Any) -> dict[Labels, tuple[float, float]]:
        if isinstance(right, float):
            return {labels: (value, right) for labels, value in left.items()}
        if isinstance(left, float):
            return {labels: (left, value) for labels, value in right.items()}
        return {labels: (left[labels], right[labels]) for labels in left if labels in right}

    def _term(self) -> Any:
        token = self._take()
        if token == "(":
            inner = self.conjunction()
            self._take(")")
            return inner
        if re.fullmatch(r"\d+(\.\d+)?", token):
            return float(token)
        if token in ("sum", "max", "min"):
            return self._aggregate({"sum": sum, "max": max, "min": min}[token])
        if token in ("increase", "delta", "rate", "changes", "min_over_time"):
            return self._range(token)
        if token == "time":
            self._take("(")
            self._take(")")
            return self._history.now
        return self._matching(self._history.instant(token))

    def _aggregate(self, work: Callable[[list[float]], float]) -> Vector:
        names = self._labels() if self._peek() == "by" and self._take() else []
        self._take("(")
        inner = self.conjunction()
        self._take(")")
        groups: dict[Labels, list[float]] = {}
        for labels, value in inner.items():
            groups.setdefault(_only(labels, names), []).append(value)
        return {labels: work(values) for labels, values in groups.items()}

    def _range(self, function: str) -> Vector:
        self._take("(")
        name = self._take()
        matchers = self._matchers()
        self._take("[")
        length = self._take()
        self._take("]")
        self._take(")")
        range_s = float(length[:-1]) * UNITS[length[-1]]
        found = self._history.over(name, range_s)
        work = {
            "increase": _increase,
            "rate": lambda values: _increase(values) / range_s,
            "min_over_time": min,
            "delta": lambda values: values[-1] - values[0],
            "changes": lambda values: float(sum(a != b for a, b in itertools.pairwise(values))),
        }[function]
        return {
            labels: work(values)
            for labels, values in found.items()
            if len(values) > 1 and matchers(dict(labels))
        }

    def _labels(self) -> list[str]:
        self._take("(")
        names = [self._take()]
        while self._peek() == ",":
            self._take()
            names.append(self._take())
        self._take(")")
        return names

    def _matching(self, vector: Vector) -> Vector:
        matches = self._matchers()
        return {labels: value for labels, value in vector.items() if matches(dict(labels))}

    def _matchers(self) -> Callable[[dict[str, str]], bool]:
        if self._peek() != "{":
            return lambda labels: True
        self._take()
        wanted: list[tuple[str, str, str]] = []
        while self._peek() != "}":
            wanted.append((self._take(), self._take(), self._take().strip('"')))
            if self._peek() == ",":
                self._take()
        self._take("}")

        def matches(labels: dict[str, str]) -> bool:
            for name, operator, value in wanted:
                own = labels.get(name, "")
                equal = bool(re.fullmatch(value, own)) if operator == "=~" else own == value
                if equal == (operator == "!="):
                    return False
            return True

        return matches
