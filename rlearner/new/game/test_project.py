"""Tests of this project; run ``pytest`` in this folder."""

from pathlib import Path

import pytest
from environment import Args, Guess
from reward import quick

from rewardhub.rewards.base import Sample
from rlearner.cli import main

FOLDER = Path(__file__).parent


def test_the_game_answers_and_ends() -> None:
    game = Guess(Args(largest=9))
    assert game.reset(3, "train", seed=0).text == "A number from 0 to 9?"
    secret = game.secret
    assert not game.step("no idea").valid
    if secret > 0:
        assert game.step(f"{secret - 1}").observation.text == "Higher."
    if secret < 9:
        assert game.step(f"{secret + 1}").observation.text == "Lower."
    result = game.step(f" {secret}.")
    assert (result.reward, result.done, result.success) == (1.0, True, True)


def test_equal_tasks_are_equal_and_splits_are_not() -> None:
    game = Guess(Args(largest=10**6))
    secrets = []
    for task, split in ((1, "train"), (1, "train"), (1, "eval"), (2, "train")):
        game.reset(task, split, seed=0)
        secrets.append(game.secret)
    assert secrets[0] == secrets[1]
    assert len(set(secrets)) == 3


def test_a_turn_costs() -> None:
    sample = Sample(
        domain="guess",
        task_index=0,
        prompt="",
        response="7",
        reference="",
        reward=1.0,
        reward_parts={},
        success=True,
        end="terminated",
        num_turns=3,
        num_tokens=6,
        metrics={},
    )
    assert quick(sample, cost=0.1) == {"turns": pytest.approx(-0.3)}


def test_the_configuration_is_valid_and_a_trial_episode_is_scored() -> None:
    assert main(["check", str(FOLDER / "@name@.yaml")]) == 0
