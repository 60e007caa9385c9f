"""Long answers cost the text functions of the mathematics reward little time."""

from __future__ import annotations

import time

import pytest

from rewardhub.rewards import math_text

LONG = {"blanks": " ", "lines": "\n", "digits": "9", "unicode digits": "٣", "commas": "1,", "braces": "{", "minus": "-"}


@pytest.mark.parametrize("kind", sorted(LONG))
def test_a_long_answer_is_read_in_half_a_second(kind: str) -> None:
    text = LONG[kind] * 30_000
    for read in (math_text.has_unit, math_text.is_formula, math_text.to_latex, math_text.boxed, math_text.words):
        began = time.process_time()
        read(text)
        assert time.process_time() - began < 0.5, read


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("5 km", True),
        ("1,000.5 meters", True),
        ("$ -3%", True),
        (".5kg", True),
        ("5,", False),
        ("5, km", False),
        ("9", False),
    ],
)
def test_units_are_found_as_before(text: str, expected: bool) -> None:
    assert math_text.has_unit(text) is expected
