"""JSON and text from outside: what cannot be sent on is refused in one line."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.contract import strict

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(codec=None)),
    st.lists,
    max_leaves=8,
)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (r'["\ud83d"]', "half of a surrogate pair"),
        (r'{"\udc00": 1}', "half of a surrogate pair"),
        ('["\ud83d"]', "half of a surrogate pair"),
        ("NaN", "it holds NaN"),
        ('{"a": [-Infinity]}', "it holds -Infinity"),
        ("[-1e999]", "the number -1e999 is too large"),
        (b'"\xff"', "invalid start byte at byte 1; it must be UTF-8"),
        (b"\xff\xfe1\x00", "it must be UTF-8"),
        ("", "Expecting value"),
        ("1 2", "extra data after the value"),
        ("[" * 100_000, "recursion"),
        ("1" * 5000, "Exceeds the limit"),
    ],
)
def test_what_is_refused(data: str | bytes, problem: str) -> None:
    with pytest.raises(strict.BadJson) as caught:
        strict.parse_json(data)
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_passes() -> None:
    assert strict.parse_json(b' {"a": "\\u0000\\ud83d\\ude00", "b": [1.5, null]}\n') == {
        "a": "\0\U0001f600",
        "b": [1.5, None],
    }
    assert strict.decode_prefix("xx[1] y", 2) == ([1], 5)
    assert [strict.text_problem(text) for text in ("", "é\0", "a\ud83d")] == [
        "",
        "",
        "not valid Unicode: half of a surrogate pair at 1",
    ]


@given(VALUES)
def test_whatever_passes_can_be_encoded(value: Any) -> None:
    for text in (json.dumps(value), json.dumps(value, ensure_ascii=False)):
        with contextlib.suppress(strict.BadJson):
            json.dumps(strict.parse_json(text), ensure_ascii=False, allow_nan=False).encode()
