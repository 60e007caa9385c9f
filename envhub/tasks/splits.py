"""Divides the tasks of a data set into those for training and for evaluation, and orders them."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from broker.errors import ConfigError, DataError
from envhub.tasks.dataset import find_tasks
from envhub.tasks.demands import refusals
from envhub.tasks.folder import CONFIG, Task, read_task, refused_key
from envhub.tasks.images import plan_agent, plan_verifier
from envhub.tasks.settings import TaskArgs

# a working folder here would bring the policy's files into the system of the tests
SYSTEM_FOLDERS = (
    "/",
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib64",
    "/etc",
    "/tests",
    "/logs",
    "/proc",
)


def split_tasks(args: TaskArgs, split: str) -> tuple[Path, ...]:
    """Return the task folders of a split in the order of the data set.

    Raises:
        ConfigError: if there are none.
        DataError: if a registry file is malformed.
    """
    if split == "eval" and args.eval_path is not None:
        return _list_folders(args.eval_path, args.dataset, args.tasks, "eval_path")
    folders = _list_folders(args.path, args.dataset, args.tasks, "path")
    if args.eval_path is not None:
        return folders
    held_out = max(round(len(folders) * args.eval_share), int(args.eval_share > 0))
    training = len(folders) - held_out
    return folders[training:] if split == "eval" else folders[:training]


def pick_task(args: TaskArgs, split: str, task_index: int) -> Task:
    """Return a task; training shuffles them every epoch."""
    folders = split_tasks(args, split)
    epoch, position = divmod(task_index, len(folders))
    if split == "train":
        position = int(_epoch_order(len(folders), args.shuffle_seed, epoch)[position])
    return read_task(folders[position])


def check_tasks(args: TaskArgs) -> None:
    """Read all tasks again and refuse what they demand and would not get.

    Raises:
        ConfigError: if a key of a task or of the settings is not allowed.
        DataError: if a file of a task is missing or malformed.
    """
    _list_folders.cache_clear()
    read_task.cache_clear()
    if not split_tasks(args, "train"):
        allowed = "a smaller share: it leaves no task for training"
        raise ConfigError("eval_share", args.eval_share, allowed)
    for folder in dict.fromkeys((*split_tasks(args, "train"), *split_tasks(args, "eval"))):
        check_task(read_task(folder), args)


def check_task(task: Task, args: TaskArgs) -> None:
    """Refuse what one task demands and would not get.

    Raises:
        ConfigError: if the run names no image for it.
        DataError: names the file and its key, or the line of its Dockerfile.
    """
    network = args.network == "host"
    shared = args.verifier == "shared"
    for key, value, allowed in refusals(task.table, network=network, shared=shared):
        raise refused_key(task.folder / CONFIG, key, value, allowed)
    workdir = plan_agent(task, args.images).workdir
    if workdir.rstrip("/") in {path.rstrip("/") for path in SYSTEM_FOLDERS}:
        allowed = f"a folder of its own, such as /app: not {', '.join(SYSTEM_FOLDERS)}"
        raise refused_key(task.folder / CONFIG, "environment.workdir", workdir, allowed)
    for step in task.steps:
        if (step.table.verifier.mode or task.table.verifier.mode) == "separate":
            for tests in step.tests:
                plan_verifier(task, tests, args.images)
    needed = {*task.table.environment.env.values(), *task.table.verifier.env.values()}
    for value in needed:
        name = value.removeprefix("${").removesuffix("}")
        if value == f"${{{name}}}" and name not in args.env:
            problem = f"${{{name}}} has no value; give env_args.env.{name}"
            raise DataError(str(task.folder / CONFIG), 1, problem)


@lru_cache(maxsize=16)
def _list_folders(path: str, dataset: str, names: tuple[str, ...], key: str) -> tuple[Path, ...]:
    return tuple(folder.absolute() for folder in find_tasks(path, dataset, names, key))


@lru_cache(maxsize=4)
def _epoch_order(num_tasks: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    return np.random.default_rng([seed, epoch]).permutation(num_tasks)
