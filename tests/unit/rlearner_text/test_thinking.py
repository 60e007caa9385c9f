"""What stands before a model's answer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlearner_text.thinking import (
    TextPiece,
    ThinkingSplitter,
    after_thinking,
    split_thinking,
    with_thinking,
    without_thinking,
)


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


@pytest.mark.parametrize(
    ("text", "reasoning", "rest"),
    [
        ("L", "", "L"),
        ("  L ", "", "  L "),
        ("<think>\nso\n L?\n</think>\n\nR ", "so\n L?", "R "),
        ("\n<think>so", "so", ""),
        ("<think>so </thi", "so </thi", ""),
        ("<think>\n\n</think>\n\nR", "", "R"),
        ("<thin", "", "<thin"),
        ("R <think>late</think>", "", "R <think>late</think>"),
        ("<think>a</think>b<think>c</think>", "a", "b<think>c</think>"),
        ("", "", ""),
    ],
)
def test_reasoning_at_the_beginning_is_split_off(text: str, reasoning: str, rest: str) -> None:
    assert split_thinking(text) == (reasoning, rest)


def test_reasoning_that_the_prompt_has_opened() -> None:
    assert split_thinking("so?\n</think>\n\nR", is_open=True) == ("so?", "R")
    assert split_thinking(" so", is_open=True) == ("so", "")
    assert split_thinking("</think>R", is_open=True) == ("", "R")


def test_pieces_hold_back_what_may_become_a_tag() -> None:
    splitter = ThinkingSplitter()
    assert splitter.add("<th") == []
    assert splitter.add("ink> a ") == [("thinking", "a")]
    assert splitter.add("b</thi") == [("thinking", " b")]
    assert splitter.add("s") == [("thinking", "</this")]
    assert splitter.add("</think>\n") == []
    assert splitter.add("\nR") == [("text", "R")]
    assert splitter.add(" ") == [("text", " ")]
    assert splitter.end() == []


PARTS = st.lists(
    st.sampled_from(["<think>", "</think>", "<", "think", "</", "/think>", ">", " ", "\n", "a"]),
    max_size=12,
)


@given(PARTS, st.booleans(), st.data())
def test_any_pieces_come_to_the_same_split(
    parts: list[str], is_open: bool, data: st.DataObject
) -> None:
    text = "".join(parts)
    splitter = ThinkingSplitter(is_open=is_open)
    pieces: list[TextPiece] = []
    rest = text
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        pieces += splitter.add(rest[:size])
        rest = rest[size:]
    pieces += splitter.end()
    split = tuple("".join(t for kind, t in pieces if kind == of) for of in ("thinking", "text"))
    assert split == split_thinking(text, is_open=is_open)
    assert all(piece for _, piece in pieces)


def test_reasoning_is_put_back_where_templates_look_for_it() -> None:
    assert with_thinking("so", "R") == "<think>\nso\n</think>\n\nR"
    assert split_thinking(with_thinking("so", "R")) == ("so", "R")
    assert with_thinking("", "R") == "R"
