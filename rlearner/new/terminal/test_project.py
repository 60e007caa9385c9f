"""Tests of this project; run ``pytest`` in this folder."""

from pathlib import Path

import pytest

from envhub.tasks.folder import read_task
from rlearner.cli import main

FOLDER = Path(__file__).parent
TASKS = sorted((FOLDER / "tasks").iterdir())


@pytest.mark.parametrize("folder", TASKS, ids=lambda folder: folder.name)
def test_a_task_has_one_step_with_tests_and_a_solution(folder: Path) -> None:
    task = read_task(folder)
    assert len(task.steps) == 1
    assert (task.steps[0].solution / "solve.sh").is_file()


def test_no_instruction_tells_the_answer() -> None:
    for folder in TASKS:
        answer = (folder / "tests" / "expected.txt").read_text()
        assert answer not in read_task(folder).steps[0].instruction


def test_a_solution_gets_the_reward_and_idleness_does_not() -> None:
    tasks = [str(folder) for folder in TASKS[:5]]
    assert main(["tasks", "try", *tasks, "--image", "*=host"]) == 0


def test_the_configuration_is_valid() -> None:
    assert main(["check", str(FOLDER / "@name@.yaml")]) == 0
