"""Environments and a reward that fail on a host where the file named by the environment variable
BAD_HOST exists.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from envhub.envs.base import Environment, Observation, Split, StepResult


def check() -> None:
    """Raise on a bad host."""
    if Path(os.environ.get("BAD_HOST") or "/nowhere").exists():
        raise OSError("the simulator is not installed")


class Stepper(Environment):
    """Ends after one step, which fails on a bad host."""

    isolation = "none"

    def reset(self, task_index: int, split: Split, seed: int) -> Observation:
        return Observation("go")

    def step(self, text: str) -> StepResult:
        check()
        return StepResult(Observation("done"), 1.0, done=True, success=True)


class Simulator(Stepper):
    """The same, and its reset fails too."""

    def reset(self, task_index: int, split: Split, seed: int) -> Observation:
        check()
        return super().reset(task_index, split, seed)


def score(sample: Any) -> float:
    """Fail for every sample on a bad host."""
    check()
    return float(len(sample.response))
