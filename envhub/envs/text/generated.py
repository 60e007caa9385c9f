"""The base class of environments with generated questions, whose answers a rule checks.

A hash of the task decides whether it is held out, so no seed can leak a held-out task into
training.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, Final

import msgspec
import numpy as np

from broker.errors import ConfigError
from envhub.envs.base import Environment, Observation, Split, StepResult

HELD_OUT_SHARE: Final = 4  # one task in this many is held out
MAX_HELD_OUT: Final = 512
MAX_DRAWS: Final = 20_000


class GeneratedTask(msgspec.Struct, frozen=True):
    """A question and what its answer must be.

    Attributes:
        question: the user message.
        reference: a right answer.
        identity: equal for tasks that count as the same one, which are all held out or all trained
            on.
    """

    question: str
    reference: str
    identity: str


Draw = Callable[[Any, np.random.Generator], GeneratedTask]


class GeneratedEnvironment(Environment):
    """One task at a time. The reward is 1 for a right answer, else 0."""

    isolation = "none"
    task: GeneratedTask

    @classmethod
    def draw(cls, args: Any, rng: np.random.Generator) -> GeneratedTask:
        """Return a random task of either split; ``rng`` is the only source of randomness."""
        raise NotImplementedError

    def is_valid(self, text: str) -> bool:
        """Return whether a text is an answer at all."""
        return bool(text.strip())

    def is_right(self, text: str) -> bool:
        """Return whether the text answers the present task."""
        return text.strip() == self.task.reference

    @classmethod
    def check(cls, args: Any) -> None:
        """Refuse arguments that leave no task to train on or none to hold out."""
        _training_task(cls.draw, args, 0, 0)
        if not _held_out_tasks(cls.draw, args):
            raise ConfigError(
                "env_args",
                args.model_dump(),
                "arguments with more different tasks: none is held out",
            )

    @classmethod
    def num_tasks(cls, args: Any, split: Split) -> int | None:
        if split == "train":
            return None
        return len(_held_out_tasks(cls.draw, args))

    def reset(self, task_index: int, split: Split, seed: int) -> Observation:
        """Ask the question; held-out tasks are the same for every seed."""
        if split == "eval":
            tasks = _held_out_tasks(self.draw, self.args)
            self.task = tasks[task_index % len(tasks)]
        else:
            self.task = _training_task(self.draw, self.args, seed, task_index)
        self.prompt = self.task.question
        self.reference = self.task.reference
        return Observation(self.task.question)

    def step(self, text: str) -> StepResult:
        is_right = self.is_right(text)
        return StepResult(
            Observation(""), float(is_right), done=True, valid=self.is_valid(text), success=is_right
        )

    def demonstrate(self, rng: np.random.Generator, noise: float) -> str:
        """Return a right answer; with probability ``noise`` another task's."""
        if rng.random() < noise:
            return self.draw(self.args, rng).reference
        return self.task.reference


def is_held_out(identity: str) -> bool:
    """Return whether a task belongs to evaluation."""
    return hashlib.blake2b(identity.encode(), digest_size=1).digest()[0] % HELD_OUT_SHARE == 0


@lru_cache(maxsize=4096)  # the episodes of a group have the same task
def _training_task(draw: Draw, args: Any, seed: int, task_index: int) -> GeneratedTask:
    for task in _draw_tasks(draw, args, [seed, task_index, 0]):
        if not is_held_out(task.identity):
            return task
    raise ConfigError(
        "env_args",
        args.model_dump(),
        "arguments with more different tasks: all of these are held out",
    )


@lru_cache(maxsize=16)
def _held_out_tasks(draw: Draw, args: Any) -> tuple[GeneratedTask, ...]:
    """Return up to ``MAX_HELD_OUT`` held-out tasks that all differ."""
    tasks: dict[str, GeneratedTask] = {}
    for task in _draw_tasks(draw, args, [0, 0, 1]):
        if is_held_out(task.identity):
            tasks.setdefault(task.identity, task)
            if len(tasks) == MAX_HELD_OUT:
                break
    return tuple(tasks.values())


def _draw_tasks(draw: Draw, args: Any, seed: list[int]) -> Iterator[GeneratedTask]:
    rng = np.random.default_rng(seed)
    for _ in range(MAX_DRAWS):
        yield draw(args, rng)
