"""What stands before a model's answer."""

from __future__ import annotations

import pytest

from rlearner_text.thinking import after_thinking, without_thinking


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("L", "L"),
        ("  L", "  L"),
        ("<think>so\nL?</think>\n\nR", "R"),
        ("so L?</think>R", "R"),  # the template opened the block
        ("<think>a</think>b<think>c</think> d", "d"),
        ("<think>never closed, L", ""),
        ("<think>a</think>R<think>once more", "R"),
        ("</think>", ""),
        ("", ""),
    ],
)
def test_only_what_follows_the_thinking_is_said(text: str, said: str) -> None:
    assert without_thinking(text) == said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("R", "R"),
        ("<think>L</think>R", "R"),
        ("L</think>R", "R"),
        ("<think>never closed, R", ""),
        ("R <think>once more", ""),
        ("<think>a</think>R<think>once more", ""),
    ],
)
def test_an_unclosed_thinking_leaves_no_answer(text: str, said: str) -> None:
    assert after_thinking(text) == said
