"""reasoning-gym's questions, one turn each (Stojanovski et al. 2025, arXiv:2505.24760).

The data set scores the answers and serves both splits: its first ``size`` entries are for training,
the next ``eval_size`` for evaluation. Training skips questions that evaluation also has.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np
from pydantic import Field, PositiveInt

from broker.errors import ConfigError
from broker.settings.config import Section
from envhub.envs.adapters.foreign import library, one_line
from envhub.envs.base import Environment, Observation, Split, StepResult
from envhub.envs.text.answers import tagged

INSTALL: Final = "pip install 'rlearner[reasoning-gym]'"


class ReasoningGymArgs(Section):
    """``env_args`` of ``reasoning_gym``."""

    harmless = ("dataset", "size", "eval_size", "dataset_seed", "answer_tag", "success_score")

    dataset: str  # as reasoning_gym.create_dataset takes it, for example chain_sum
    dataset_args: dict[str, Any] = Field(default={})  # passed on to it
    size: PositiveInt = 100_000  # entries for training; a larger index wraps around
    eval_size: PositiveInt = 256
    dataset_seed: Annotated[int, Field(ge=0)] = 0
    # read the answer from the last <answer>…</answer> instead of the whole text
    answer_tag: bool = False
    success_score: float = 1.0  # an answer of at least this score is a success


class ReasoningGymEnv(Environment):
    """One question at a time."""

    Args = ReasoningGymArgs

    args: ReasoningGymArgs

    def __init__(self, args: ReasoningGymArgs) -> None:
        super().__init__(args)
        self._data = _load_dataset(args)
        self._entry: dict[str, Any] = {}

    @classmethod
    def check(cls, args: ReasoningGymArgs) -> None:
        _load_dataset(args)
        different = len(_held_out(args))
        if different < args.eval_size / 2:
            allowed = f"about {different}, since {args.dataset} has hardly more different questions"
            raise ConfigError("eval_size", args.eval_size, allowed)

    @classmethod
    def num_tasks(cls, args: ReasoningGymArgs, split: Split) -> int | None:
        return args.eval_size if split == "eval" else args.size

    @classmethod
    def example(cls, folder: Path) -> dict[str, Any]:
        library("reasoning_gym", "reasoning_gym", INSTALL)
        return {"dataset": "chain_sum", "eval_size": 64}

    def reset(self, task_index: int, split: Split, seed: int) -> Observation:
        """Ask the question of the index, whatever the seed, so that an epoch asks each one once."""
        self._entry = self._find(task_index, split)
        self.prompt = self._entry["question"]
        self.reference = str(self._entry["answer"])
        return Observation(self.prompt)

    def step(self, text: str) -> StepResult:
        answer = tagged(text, self.args.answer_tag)
        score = float(self._data.score_answer(answer, self._entry)) if answer else 0.0
        return StepResult(
            Observation(""), score, True, bool(answer), score >= self.args.success_score
        )

    def demonstrate(self, rng: np.random.Generator, noise: float) -> str:
        """Return the reference answer; with probability ``noise`` that of another question."""
        answer = self.reference
        if rng.random() < noise:
            answer = str(self._data[int(rng.integers(self.args.size))]["answer"])
        return f"<answer>{answer}</answer>" if self.args.answer_tag else answer

    def _find(self, task_index: int, split: Split) -> dict[str, Any]:
        if split == "eval":
            return dict(self._data[self.args.size + task_index % self.args.eval_size])
        held_out = _held_out(self.args)
        for index in range(task_index, task_index + self.args.size):
            entry = dict(self._data[index % self.args.size])
            if entry["question"] not in held_out:
                return entry
        raise ValueError(f"evaluation has every question of {self.args.dataset}")


def _load_dataset(args: ReasoningGymArgs) -> Any:
    # arguments as text, which the cache can hash
    return _create_dataset(
        args.dataset, json.dumps(args.dataset_args), args.dataset_seed, args.size + args.eval_size
    )


@lru_cache(maxsize=8)
def _create_dataset(name: str, arguments: str, seed: int, size: int) -> Any:
    module = library("reasoning_gym", "reasoning_gym", INSTALL)
    try:
        return module.create_dataset(name, **{**json.loads(arguments), "seed": seed, "size": size})
    except (TypeError, ValueError, AssertionError) as error:
        problem = one_line(error) or type(error).__name__
        raise ConfigError(
            "dataset", name, f"a data set that reasoning_gym.create_dataset makes: {problem}"
        ) from None


def _held_out(args: ReasoningGymArgs) -> frozenset[str]:
    return _eval_questions(
        args.dataset, json.dumps(args.dataset_args), args.dataset_seed, args.size, args.eval_size
    )


@lru_cache(maxsize=8)
def _eval_questions(
    name: str, arguments: str, seed: int, size: int, eval_size: int
) -> frozenset[str]:
    data = _create_dataset(name, arguments, seed, size + eval_size)
    return frozenset(data[index]["question"] for index in range(size, size + eval_size))
