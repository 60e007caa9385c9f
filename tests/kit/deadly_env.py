"""An environment that runs in the hub's own process and ends it, as a bug of the hub would."""

from __future__ import annotations

import os

from broker.settings.config import Section
from envhub.envs.base import Environment, Observation, Split, StepResult


class DeadlyArgs(Section):
    """``env_args`` of the deadly environment."""

    task: int  # the task that kills


class Deadly(Environment):
    """One step; in one of the tasks the process does not survive it."""

    Args = DeadlyArgs
    isolation = "none"
    args: DeadlyArgs
    task_index = -1

    def reset(self, task_index: int, split: Split, seed: int) -> Observation:
        self.task_index = task_index
        return Observation("?", anchor="?")

    def step(self, text: str) -> StepResult:
        if self.task_index == self.args.task:
            os._exit(1)
        return StepResult(Observation(".", anchor="."), 1.0, True, True, True)
