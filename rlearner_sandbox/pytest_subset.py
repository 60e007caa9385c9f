"""The parts of pytest that test files use, for a sandbox without it. Runs inside, as ``pytest``.

``raises``, ``fail``, and ``approx`` of numbers and of lists, tuples and dicts of them; no fixtures
and no marks.
"""

from __future__ import annotations

import math
import re
from typing import Any, NoReturn


class raises:
    """Fails unless its block raises one of these; ``value`` is what it raised."""

    def __init__(self, expected: Any, *args: Any, match: str | None = None) -> None:
        self._expected = expected
        self._match = match
        self.value: Any = None
        if args:
            with self:
                args[0](*args[1:])

    def __enter__(self) -> raises:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, _: object) -> bool:
        if error is None:
            raise AssertionError(f"did not raise {self._expected}")
        if not isinstance(error, self._expected):
            return False
        if self._match is not None and not re.search(self._match, str(error)):
            raise AssertionError(f"{str(error)!r} does not match {self._match!r}")
        self.value = error
        self.type = kind
        return True


class approx:
    """Equal to numbers that are nearly these: by ``rel`` (1e-6) of them, or by ``abs`` (1e-12)."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, expected: Any, rel: float = 1e-6, abs: float = 1e-12) -> None:
        self._expected = expected
        self._rel = rel
        self._abs = abs

    def __eq__(self, actual: object) -> bool:
        return self._near(self._expected, actual)

    def _near(self, expected: Any, actual: Any) -> bool:
        if isinstance(expected, dict):
            is_same = isinstance(actual, dict) and expected.keys() == actual.keys()
            return is_same and all(self._near(expected[k], actual[k]) for k in expected)
        if isinstance(expected, (list, tuple)):
            is_same = type(expected) is type(actual) and len(expected) == len(actual)
            return is_same and all(map(self._near, expected, actual))
        if type(actual) in (int, float) and type(expected) in (int, float):
            if not math.isfinite(actual):
                return bool(expected == actual)
            return math.isclose(expected, actual, rel_tol=self._rel, abs_tol=self._abs)
        return bool(expected == actual)


def fail(reason: str = "") -> NoReturn:
    raise AssertionError(reason)
