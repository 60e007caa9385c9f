"""What a program and its tests can say to each other: plain data as itself, anything else not at
all; and whose names are whose.
"""

from __future__ import annotations

import collections
import contextlib
import json
from decimal import Decimal
from enum import IntEnum
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlearner_sandbox.names import names_of
from rlearner_sandbox.plain import Garbled, from_json, to_json

HASHABLE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters(codec=None)) | st.binary()
    | st.complex_numbers(allow_nan=False) | st.fractions() | st.decimals(allow_nan=False),
    lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
VALUES = st.recursive(
    HASHABLE
    | st.binary().map(bytearray)
    | st.builds(range, st.integers(-9, 9), st.integers(-9, 9), st.integers(1, 3)),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(HASHABLE, inner, max_size=4)
        | st.lists(inner).map(collections.deque)
    ),
    max_leaves=10,
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda x: st.lists(x) | st.dictionaries(st.text(), x),
)


class Refused(Exception):
    pass


def refuse(value: Any) -> Any:
    raise Refused


def sent(value: Any) -> Any:
    return from_json(json.loads(json.dumps(to_json(value, refuse))), refuse)


def types(value: Any) -> Any:
    inner = (
        value.items()
        if isinstance(value, dict)
        else value
        if isinstance(value, (list, tuple, set, frozenset, collections.deque))
        else ()
    )
    return type(value), sorted(repr(types(one)) for one in inner)


@settings(max_examples=50)
@given(VALUES)
def test_plain_data_comes_back_as_it_was(value: Any) -> None:
    found = sent(value)
    assert found == value
    assert types(found) == types(value)


class Equal(int):
    __eq__ = lambda self, other: True  # noqa: E731
    __hash__ = int.__hash__


class Level(IntEnum):
    HIGH = 7


def test_subclasses_become_what_they_derive_from() -> None:
    found = sent(
        [
            Equal(7),
            Level.HIGH,
            collections.Counter("a"),
            type("L", (list,), {})([1]),
            collections.namedtuple("P", "x")(1),
        ]
    )
    assert found == [7, 7, {"a": 1}, [1], (1,)]
    assert [type(one) for one in found] == [int, int, dict, list, tuple]
    assert sent([Decimal("0.10"), Fraction(1, 3), 10**5000, int, float("inf")]) == [
        Decimal("0.10"),
        Fraction(1, 3),
        10**5000,
        int,
        float("inf"),
    ]


@pytest.mark.parametrize(
    "value", [object(), len, Refused, lambda: 1, Equal, (1, [object()]), {1: refuse}]
)
def test_anything_else_is_refused(value: Any) -> None:
    with pytest.raises(Refused):
        to_json(value, refuse)


@settings(max_examples=50)
@given(JSON)
def test_any_json_is_plain_data_or_garbled(node: Any) -> None:
    with contextlib.suppress(Garbled, Refused):
        types(from_json(node, refuse))


@pytest.mark.parametrize(
    "node", [{}, [], ["list"], ["list", 3], ["dict", [[1]]], ["set", [["list", []]]], ["int", "x"], ["bytes", "0"],
        ["type", "eval"], ["range", 1, 2, 0], ["number", "Decimal", "x"]],
)  # fmt: skip
def test_what_is_garbled(node: Any) -> None:
    with pytest.raises((Garbled, KeyError)):
        from_json(node, refuse)


@pytest.mark.parametrize(
    ("texts", "program", "library"),
    [
        (["assert add(1, x) == len([2])"], ("add", "x"), {}),
        (["x = add(1)", "assert x == 2 and y"], ("add", "y"), {}),
        (["assert math.isclose(f(1), np.pi)"], ("f",), {"math": ("math", ""), "np": ("numpy", "")}),
        (["assert math(1) == 2"], ("math",), {}),
        (["assert Counter(f(1)) == Counter([1])"], ("f",), {"Counter": ("collections", "Counter")}),
        (["assert Counter('a') == {'a': 1}"], ("Counter",), {}),
        (["from math import isclose\nassert isclose(f(1), 2)"], ("f",), {}),
        (["def check(candidate):\n    assert candidate(1)", "check(f)"], ("candidate", "f"), {}),
        (["def test():\n    import math\n    f(math.pi)"], ("f",), {"math": ("math", "")}),
        (["try:\n    f()\nexcept E as e:\n    assert str(e)"], ("f", "E"), {}),
        (
            ["for i, (a, b) in enumerate(g()):\n    assert a == b == i\nwith h() as k:\n    k()"],
            ("g", "h"),
            {},
        ),
        (["assert [n for n in f()] and n"], ("f", "n"), {}),
        # all that they use, so it is the program's
        (["assert sum(10, 15) == 6", "assert sum(4, 8) == 7"], ("sum",), {}),
        (["assert sum(10, 15) == 6", "assert abs(-1) == 1"], (), {}),
        (["assert isinstance(f(1), int) and sum(f(2)) == 3"], ("f",), {}),
    ],
)
def test_names_of_tests(
    texts: list[str], program: tuple[str, ...], library: dict[str, tuple[str, str]]
) -> None:
    found = names_of(tuple(texts))
    assert (set(found.program), found.library) == (set(program), library)


def test_what_tests_import_and_must_not_use() -> None:
    assert names_of(("from solution import *",)).imports
    assert not names_of(("import solutions",)).imports
    assert names_of(("assert eval(f()) == 1", "exec('x')")).unsafe == ("eval", "exec")
    assert names_of(("def eval(x): return x", "assert eval(f()) == 1")).unsafe == ()
