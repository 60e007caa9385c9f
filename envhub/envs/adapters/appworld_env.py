"""AppWorld's tasks, solved by Python that calls apps' APIs (Trivedi et al. 2024, arXiv:2407.18901).

Each turn's code is executed in the task's interpreter and its output is shown;
``apis.supervisor.complete_task()`` ends the episode. The reward is the share of AppWorld's unit
tests that pass, or 1 only if all do. AppWorld (https://appworld.dev) keeps one world in a process,
so environments run in worker processes, by default in a sandbox.
"""

from __future__ import annotations

import os
import re
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import PositiveInt

from broker.errors import ConfigError, NotInstalled
from broker.settings.config import Section
from envhub.envs.adapters.foreign import library
from envhub.envs.base import Environment, Observation, Split, StepResult

INSTALL: Final = "pip install appworld, then appworld install and appworld download data"
Tasks = Literal["train", "dev", "test_normal", "test_challenge"]
_FENCED: Final = re.compile(r"```(?:python|py)?\n(.*?)(?:```|\Z)", re.DOTALL)


class AppworldArgs(Section):
    """``env_args`` of ``appworld``."""

    harmless = ("train_tasks", "eval_tasks", "max_interactions", "reward")

    train_tasks: Tasks = "train"
    eval_tasks: Tasks = "dev"
    experiment_name: str = "rlearner"  # AppWorld writes its outputs to a folder of this name
    max_interactions: PositiveInt = 50
    reward: Literal["share", "success"] = "share"  # of its tests that pass, or 1 only if all do


class AppworldEnv(Environment):
    """One task at a time."""

    Args = AppworldArgs
    isolation = "sandbox"  # it executes what the policy writes

    args: AppworldArgs

    def __init__(self, args: AppworldArgs) -> None:
        super().__init__(args)
        self._world: Any = None
        self._turns = 0
        self._shown = ""

    @classmethod
    def check(cls, args: AppworldArgs) -> None:
        if args.train_tasks == args.eval_tasks:
            raise ConfigError("eval_tasks", args.eval_tasks, "other tasks than train_tasks")
        for key, name in (("train_tasks", args.train_tasks), ("eval_tasks", args.eval_tasks)):
            if not _tasks(name):
                raise ConfigError(key, name, f"installed tasks; {INSTALL}")

    @classmethod
    def folders(cls, args: AppworldArgs) -> tuple[list[str], list[str]]:
        root = Path(os.environ.get("APPWORLD_ROOT") or ".").absolute()
        return [str(root / "data")], [str(root / "experiments")]

    @classmethod
    def num_tasks(cls, args: AppworldArgs, split: Split) -> int | None:
        return len(_tasks(args.train_tasks if split == "train" else args.eval_tasks))

    @classmethod
    def example(cls, folder: Path) -> dict[str, Any]:
        if not _tasks("train"):
            raise NotInstalled(f"environment appworld: there are no tasks; {INSTALL}")
        return {}

    def reset(self, task_index: int, split: Split, seed: int) -> Observation:
        """Start a task of AppWorld's; the seed has no effect."""
        self.close()
        task_ids = _tasks(self.args.train_tasks if split == "train" else self.args.eval_tasks)
        app = library("appworld", "appworld", INSTALL)
        self._world = app.AppWorld(
            task_id=task_ids[task_index % len(task_ids)], experiment_name=self.args.experiment_name
        )
        self._turns = 0
        task = self._world.task
        person = task.supervisor
        self.prompt = str(task.instruction)
        contact = f"my e-mail is {person.email}, my phone number {person.phone_number}."
        name = f"{person.first_name} {person.last_name}"
        self._shown = f"My name is {name}, {contact}\nTask: {task.instruction}"
        return Observation(self._shown)

    def step(self, text: str) -> StepResult:
        block = _FENCED.search(text)
        code = (block[1] if block else text).strip()
        self._turns += 1
        if code:
            self._shown = str(self._world.execute(code))
        is_done = bool(self._world.task_completed())
        is_cut = not is_done and self._turns >= self.args.max_interactions
        share = 0.0
        success = False
        if is_done or is_cut:
            share, success = self._evaluate()
        reward = share if self.args.reward == "share" else float(success)
        observation = Observation(self._shown)
        metrics = {"tests_passed": share}
        return StepResult(
            observation,
            reward,
            is_done or is_cut,
            bool(code),
            success and is_done,
            truncated=is_cut,
            metrics=metrics,
        )

    def text_frame(self) -> str:
        return self._shown

    def close(self) -> None:
        if self._world is not None:
            self._world.close()
            self._world = None

    def _evaluate(self) -> tuple[float, bool]:
        """Return (share of the tests that pass, whether all do)."""
        tracker = self._world.evaluate()
        passed = len(tracker.passes)
        failed = len(tracker.failures)
        return passed / max(passed + failed, 1), bool(tracker.success)


@lru_cache(maxsize=4)
def _tasks(name: str) -> tuple[str, ...]:
    return tuple(library("appworld", "appworld", INSTALL).load_task_ids(name))
