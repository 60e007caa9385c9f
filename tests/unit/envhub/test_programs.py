"""Tasks of tiny programs: what is asked, the tests that score it, and the solver's own programs."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from envhub.envs.text.programs import FENCE, ProgramArgs, ProgramTasks, apply_steps, write_program


def count_passed(text: str, reference: str) -> int:
    """Run a program of the solver, and return how many of the tests it passes."""
    tests = json.loads(reference)
    scope: dict[str, Any] = {}
    exec(text.strip(FENCE), scope)
    results = [scope[tests["fn_name"]](*arguments) for arguments in tests["inputs"]]
    pairs = zip(results, tests["outputs"], strict=True)
    return sum(result == expected for result, expected in pairs)


def test_steps_apply_in_order() -> None:
    steps = (("add", 3), ("multiply by", 2), ("subtract", 5))
    assert apply_steps(steps, 7) == 15  # (7 + 3) * 2 - 5
    expected = "def f(x):\n    x = x + 3\n    x = x * 2\n    x = x - 5\n    return x"
    assert write_program(steps) == expected


@pytest.mark.parametrize("operations", [1, 3, 8])
def test_the_solvers_program_passes_its_tests(operations: int) -> None:
    environment = ProgramTasks(ProgramArgs(operations=operations))
    rng = np.random.default_rng(0)
    for index in range(20):
        observation = environment.reset(index, "train", index)
        assert observation.text.startswith("Write f(x): ")
        assert observation.text.count(", then ") == operations - 1
        program = environment.demonstrate(rng, 0.0)
        assert count_passed(program, environment.reference) == 5
        assert environment.step(program).valid


def test_a_program_of_noise_fails() -> None:
    environment = ProgramTasks(ProgramArgs(operations=4))
    rng = np.random.default_rng(0)
    passed = 0
    for index in range(20):
        environment.reset(index, "train", index)
        passed += count_passed(environment.demonstrate(rng, 1.0), environment.reference) == 5
    assert passed <= 1  # of 20, a chance of one in some thousands each
