"""Plays the solutions of tasks, and nothing at all, to show that their tests tell them apart."""

from __future__ import annotations

import argparse
import asyncio
from dataclasses import asdict, dataclass
from typing import Final

from broker.errors import ConfigError, DataError, UserError
from broker.system.visible_text import visible, visible_json
from envhub.tasks.errors import TaskError
from envhub.tasks.folder import Task, read_task
from envhub.tasks.host import TaskHost
from envhub.tasks.providers import load_provider
from envhub.tasks.rewards import scalar_reward
from envhub.tasks.settings import TaskArgs
from envhub.tasks.splits import check_task, split_tasks
from envhub.tasks.trial import Trial
from rlearner_sandbox.providers.base import SandboxError

PARALLEL: Final = 4


@dataclass(frozen=True)
class TaskTrial:
    """What became of a task.

    Attributes:
        solved: reward of its solution; None if it has none.
        idle: reward of doing nothing.
        problem: why it cannot be trained on; empty if it can.
    """

    task: str
    solved: float | None = None
    idle: float | None = None
    problem: str = ""


def try_tasks(options: argparse.Namespace) -> int:
    """Try all tasks, print a line for each, and return 1 if one cannot be trained on."""
    images = {}
    for pair in options.image:
        name, separator, image = pair.rpartition("=")
        if not separator:
            raise ConfigError("--image", pair, "NAME=host, NAME=FOLDER or NAME=sha256:…")
        images[name] = image
    trials = asyncio.run(_try_all(options.paths, images, options.provider))
    if options.json:
        print(visible_json({"tasks": [asdict(trial) for trial in trials]}))
    else:
        for trial in trials:
            print(visible(_describe(trial)))
    return int(any(trial.problem for trial in trials))


def _describe(trial: TaskTrial) -> str:
    if trial.problem:
        return f"{trial.task}: {trial.problem}"
    solved = "no solution" if trial.solved is None else f"its solution {trial.solved:g}"
    return f"{trial.task}: {solved}, nothing {trial.idle:g}"


async def _try_all(paths: list[str], images: dict[str, str], provider: str) -> list[TaskTrial]:
    places = asyncio.Semaphore(PARALLEL)
    work = []
    args = TaskArgs(path=".", images=images, provider=provider, eval_share=0.0)
    host = TaskHost(load_provider(args))
    try:
        for path in paths:
            own = args.model_copy(update={"path": path})
            work += [_try_task(read_task(folder), host, own, places)
                     for folder in split_tasks(own, "train")]  # fmt: skip
        return await asyncio.gather(*work)
    finally:
        await host.close()


async def _try_task(
    task: Task, host: TaskHost, args: TaskArgs, places: asyncio.Semaphore
) -> TaskTrial:
    async with places:
        try:
            check_task(task, args)
            idle = await _play(task, host, args, solves=False)
            if not all((step.solution / "solve.sh").is_file() for step in task.steps):
                return TaskTrial(task.name, None, idle)
            solved = await _play(task, host, args, solves=True)
        except (ConfigError, DataError, TaskError, UserError) as error:
            return TaskTrial(task.name, problem=str(error))
        except SandboxError as error:
            raise UserError(f"provider {args.provider}: {error}") from None
    problem = ""
    if solved < 1:
        problem = f"its solution gets {solved:g}, not 1"
    elif idle >= 1:
        problem = f"doing nothing gets {idle:g}, as much as its solution"
    return TaskTrial(task.name, solved, idle, problem)


async def _play(task: Task, host: TaskHost, args: TaskArgs, *, solves: bool) -> float:
    """Return the reward of the solution, or of nothing."""
    trial = Trial(host, task, args)
    try:
        await trial.begin()
        is_over = False
        while not is_over:
            if solves:
                await trial.run_solution()
            is_over = await trial.grade()
        return scalar_reward(trial.rewards(), args.reward)
    finally:
        await trial.close()
