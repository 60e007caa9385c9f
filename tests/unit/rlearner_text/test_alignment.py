"""Logprobs carried from one tokenizer's tokens to another's, by hand and for any cuts of a text."""

from __future__ import annotations

import math
from pathlib import Path

import envhub_kit
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlearner_text.tokenizer import Tokenizer
from rlearner_text.vocabularies.alignment import INSIDE, spread_logprobs, token_ends


class WordTokenizer:
    """Tokens are given texts; the bytes of ``é`` are two tokens, 8 and 9."""

    TEXTS = (b"The", b" cat", b" ca", b"t", b"!")

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        pieces = {8: b"\xc3", 9: b"\xa9"} | dict(enumerate(self.TEXTS))
        return b"".join(pieces[token] for token in ids).decode("utf-8", "replace")


def ends_of(*ids: int) -> list[int]:
    return token_ends(WordTokenizer(), ids)  # type: ignore[arg-type]


def test_ends_by_hand() -> None:
    # "The" 3, " cat" 7, "!" 8; é is one character of two tokens, the first of which ends inside it
    assert ends_of(0, 1, 4) == [3, 7, 8]
    assert ends_of(0, 2, 3, 4) == [3, 6, 7, 8]
    assert ends_of(0, 8, 9, 4) == [3, INSIDE, 4, 5]
    assert ends_of(8) == [INSIDE]
    assert ends_of() == []


def test_ends_of_a_tokenizer(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(envhub_kit.write_tokenizer(tmp_path))
    text = "go left"
    assert token_ends(tokenizer, tokenizer.encode(text)) == list(range(1, len(text) + 1))


def test_chunks_share_their_logprob_by_hand() -> None:
    # Texts: The| cat|! and The| ca|t|!. The first chunk takes over -2. " cat" gets the sum of
    # " ca" and "t", -0.5 - 0.25. "!" takes over 0.
    ends, other_ends = [3, 7, 8], [3, 6, 7, 8]
    assert spread_logprobs(ends, [-1.0, -3.0, -1.0], other_ends, [-2.0, -0.5, -0.25, 0.0]) == [
        -2.0,
        -0.75,
        0.0,
    ]
    # The other way round, " ca" and "t" share -3 as -0.5 to -0.25: -2 and -1.
    assert spread_logprobs(other_ends, [-2.0, -0.5, -0.25, 0.0], ends, [-1.0, -3.0, -4.0]) == [
        -1.0,
        -2.0,
        -1.0,
        -4.0,
    ]


def test_certain_tokens_share_equally() -> None:
    assert spread_logprobs([6, 7], [0.0, 0.0], [7], [-1.0]) == [-0.5, -0.5]


def test_texts_of_other_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\[7\] and \[8\]"):
        spread_logprobs([7], [-1.0], [8], [-1.0])


CUTS = st.lists(st.integers(1, 30), min_size=1, max_size=12, unique=True).map(sorted)
VALUES = st.floats(-20.0, 0.0)


@given(CUTS, CUTS, st.data())
def test_the_sum_is_kept_and_no_value_is_above_0(
    ends: list[int], other_ends: list[int], data: st.DataObject
) -> None:
    ends = [*ends, 31]
    other_ends = [*other_ends, 31]
    logprobs = data.draw(st.lists(VALUES, min_size=len(ends), max_size=len(ends)))
    others = data.draw(st.lists(VALUES, min_size=len(other_ends), max_size=len(other_ends)))
    spread = spread_logprobs(ends, logprobs, other_ends, others)
    assert len(spread) == len(ends)
    assert max(spread) <= 0.0
    assert math.isclose(sum(spread), sum(others), rel_tol=1e-9, abs_tol=1e-6)
