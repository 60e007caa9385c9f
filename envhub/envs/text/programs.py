"""Generated tiny programs: ``Write f(x): add 3, then multiply by 2.``

The reference answers are tests for the reward ``code``, which runs the reply's program in a
sandbox. Tasks with the same operations in the same order are one task.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np
from pydantic import Field

from broker.settings.config import Section
from envhub.envs.base import Observation, StepResult
from envhub.envs.text.generated import GeneratedEnvironment, GeneratedTask

# The statement of each operation, by the words that ask for it.
OPERATIONS: Final = {"add": "+", "subtract": "-", "multiply by": "*"}
# Small, large and negative: a wrong operation shows in at least one result.
ARGUMENTS: Final = (0, 1, 7, -3, 100)
NAMES: Final = tuple(OPERATIONS)
DIGITS: Final = (2, 10)  # numbers from 2 to 9: a digit each, and none without effect
FENCE: Final = "```"


class ProgramArgs(Section):
    """``env_args`` of ``programs``."""

    harmless = ("operations",)

    operations: Annotated[int, Field(ge=1, le=8)] = 2  # of one program, in order


class ProgramTask(GeneratedTask, frozen=True):
    """A program to write; ``steps`` are its operations, (words, number)."""

    steps: tuple[tuple[str, int], ...]


def draw_step(rng: np.random.Generator) -> tuple[str, int]:
    """Return a random operation: its words and its number."""
    return NAMES[int(rng.integers(len(NAMES)))], int(rng.integers(*DIGITS))


def write_program(steps: tuple[tuple[str, int], ...]) -> str:
    """Return the Python source of ``f``, one line per operation."""
    lines = [f"    x = x {OPERATIONS[words]} {number}" for words, number in steps]
    return "\n".join(["def f(x):", *lines, "    return x"])


def apply_steps(steps: tuple[tuple[str, int], ...], value: int) -> int:
    """Return the result of the operations on a value."""
    for words, number in steps:
        if words == "add":
            value += number
        elif words == "subtract":
            value -= number
        else:
            value *= number
    return value


class ProgramTasks(GeneratedEnvironment):
    """One program at a time; reward functions score it."""

    Args = ProgramArgs
    has_reward = False
    task: ProgramTask

    @classmethod
    def draw(cls, args: ProgramArgs, rng: np.random.Generator) -> ProgramTask:
        steps = tuple(draw_step(rng) for _ in range(args.operations))
        text = ", then ".join(f"{words} {number}" for words, number in steps)
        tests = {
            "fn_name": "f",
            "inputs": [[value] for value in ARGUMENTS],
            "outputs": [apply_steps(steps, value) for value in ARGUMENTS],
        }
        return ProgramTask(f"Write f(x): {text}.", json.dumps(tests), text, steps)

    @classmethod
    def example(cls, folder: Path) -> dict[str, Any]:
        return {"operations": 3}

    def step(self, text: str) -> StepResult:
        return StepResult(Observation(""), 0.0, done=True, valid=text.count(FENCE) > 1)

    def demonstrate(self, rng: np.random.Generator, noise: float) -> str:
        """Return a program in which each operation is another with probability ``noise``."""
        steps = tuple(draw_step(rng) if rng.random() < noise else step for step in self.task.steps)
        return f"{FENCE}\n{write_program(steps)}\n{FENCE}"
