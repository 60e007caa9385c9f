"""Tests of this project; run ``pytest`` in this folder."""

from pathlib import Path

import pytest
from agent import LARGEST, TRIES, Chat, play

from rlearner.cli import main

FOLDER = Path(__file__).parent


def halve(chat: Chat) -> str:
    """Guess the middle of what is still possible."""
    low, high = 0, LARGEST
    for said, answer in zip(chat[1::2], chat[2::2], strict=True):
        guess = int(said["content"])
        low, high = (guess + 1, high) if answer["content"] == "Higher." else (low, guess - 1)
    return str((low + high) // 2)


@pytest.mark.parametrize("seed", range(20))
def test_a_good_player_needs_few_guesses(seed: int) -> None:
    result = play(seed, halve)
    assert result["success"]
    assert result["metrics"]["guesses"] <= 4
    assert result["reward"] == 1 - (result["metrics"]["guesses"] - 1) / TRIES


def test_one_that_says_nothing_fails() -> None:
    assert play(0, lambda _: "")["reward"] == 0


def test_the_configuration_is_valid() -> None:
    assert main(["check", str(FOLDER / "@name@.yaml")]) == 0
