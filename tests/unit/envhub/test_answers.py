"""Answers in tags, against the pattern that says what they are."""

from __future__ import annotations

import re
import time

from hypothesis import given
from hypothesis import strategies as st

from envhub.envs.text.answers import tagged

PATTERN = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
PIECES = st.sampled_from(
    ["<answer>", "</answer>", "<ANSWER>", "</Answer>", "7", " ", "\n", "<", "x"]
)


@given(st.lists(PIECES, max_size=12).map("".join))
def test_the_last_tagged_text_is_the_answer(text: str) -> None:
    expected = (PATTERN.findall(text) or [""])[-1].strip()
    assert tagged(text, answer_tag=True) == expected
    assert tagged(text, answer_tag=False) == text.strip()


def test_many_open_tags_are_read_once() -> None:
    began = time.process_time()
    assert tagged("<answer>" * 200_000, answer_tag=True) == ""
    assert time.process_time() - began < 2.0  # with the pattern: minutes
