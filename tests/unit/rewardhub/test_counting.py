"""Counts of words, sentences and paragraphs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rewardhub.rewards.constraints import counting


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("", 0),
        ("One", 1),
        ("One.", 1),
        ("One. Two", 2),
        ("One... Two?! Three", 3),
        ("It costs 3.50 dollars. Yes.", 2),
        ("Mr. J. Smith met Dr. Jones.", 1),
        ("Apples, pears, etc. are fruit.", 1),
        ("Apples, pears, etc. Then more.", 2),
        ("It is 5 p.m. We go.", 2),
        ("It was in 2020. Next year came.", 2),
        ("1. First\n2. Second", 1),
        ('She said "Go." Then she left.', 2),
        ("He left (late). So did I.", 2),
        ("Title\n\nText.", 1),
        ("これは犬です。あれは猫です。", 2),
        ("यह एक कुत्ता है। वह बिल्ली है।", 2),
        ("...", 1),
    ],
)
def test_sentences(text: str, count: int) -> None:
    assert counting.count_sentences(text) == count


@pytest.mark.parametrize(
    ("text", "count"),
    [("", 0), ("a b", 2), ("don't", 2), ("snake_case", 1), ("a-b", 2), ("हिन्दी में", 2), ("é", 1)],
)
def test_words(text: str, count: int) -> None:
    assert counting.count_words(text) == count


@given(st.lists(st.text(alphabet="abc XYZ", min_size=1).filter(str.strip), max_size=8))
def test_paragraphs_between_dividers_are_found_again(paragraphs: list[str]) -> None:
    expected = [paragraph.strip() for paragraph in paragraphs]
    assert counting.split_divided("\n***\n".join(paragraphs)) == expected


@given(st.text())
def test_counts_are_never_negative_and_joining_adds_words(text: str) -> None:
    assert counting.count_sentences(text) >= 0
    assert counting.count_words(f"{text}\n{text}") == 2 * counting.count_words(text)
