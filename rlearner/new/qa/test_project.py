"""Tests of this project; run ``pytest`` in this folder."""

import json
from pathlib import Path

import pytest
from reward import right

from rewardhub.rewards.base import Sample
from rlearner.cli import main

FOLDER = Path(__file__).parent


@pytest.mark.parametrize(
    ("response", "score"),
    [("odd", 1.0), (" Odd", 1.0), ("even", 0.0), ("odd or even", 0.0), ("", 0.0)],
)
def test_the_answer_of_the_file_is_right(response: str, score: float) -> None:
    sample = Sample(
        domain="questions",
        task_index=0,
        prompt="Is 27 even or odd?",
        response=response,
        reference="odd",
        reward=0.0,
        reward_parts={},
        success=False,
        end="terminated",
        num_turns=1,
        num_tokens=2,
        metrics={},
    )
    assert right(sample) == score


def test_every_row_has_a_question_and_an_answer_and_comes_once() -> None:
    lines = (FOLDER / "questions.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    assert all(row["question"].strip() and row["answer"].strip() for row in rows)
    assert len({row["question"] for row in rows}) == len(rows)


def test_the_configuration_is_valid_and_a_trial_episode_is_scored() -> None:
    assert main(["check", str(FOLDER / "@name@.yaml")]) == 0
