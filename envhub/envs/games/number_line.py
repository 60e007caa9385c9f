"""NumberLine of GymCards as text: walk to a target (Zhai et al. 2024, RL4VLM, arXiv:2405.10292).

Actions are ``+`` and ``-``. The reward is 1 at the target, which ends the episode, -1 for a turn
that comes no nearer, else 0. After twice ``max_position`` turns the episode is cut off.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np
from pydantic import Field

from broker.settings.config import Section
from envhub.envs.base import Environment, Observation, Split, StepResult
from envhub.envs.text.answers import one_of

ACTIONS: Final = {"+": "+", "-": "-", "RIGHT": "+", "LEFT": "-"}


class NumberLineArgs(Section):
    """``env_args`` of ``number_line``."""

    harmless = ("max_position", "answer_tag")

    max_position: Annotated[int, Field(ge=2, le=1000)] = 5  # positions are 0 to this
    # read the action from the last <answer>…</answer> instead of the whole text
    answer_tag: bool = False


class NumberLine(Environment):
    """One walk at a time."""

    Args = NumberLineArgs
    isolation = "none"

    args: NumberLineArgs

    def __init__(self, args: NumberLineArgs) -> None:
        super().__init__(args)
        self._position = self._target = self._turns = 0

    @classmethod
    def num_tasks(cls, args: NumberLineArgs, split: Split) -> int | None:
        return len(_split_pairs(args.max_position, split))

    @classmethod
    def example(cls, folder: Path) -> dict[str, Any]:
        return {"max_position": 6}

    def reset(self, task_index: int, split: Split, seed: int) -> Observation:
        """Start at the task's position; the seed has no effect."""
        pairs = _split_pairs(self.args.max_position, split)
        self._position, self._target = pairs[task_index % len(pairs)]
        self._turns = 0
        return self._observe()

    def step(self, text: str) -> StepResult:
        action = one_of(text, ACTIONS, self.args.answer_tag)
        self._turns += 1
        old_distance = abs(self._position - self._target)
        if action == "+":
            self._position = min(self._position + 1, self.args.max_position)
        elif action == "-":
            self._position = max(self._position - 1, 0)
        distance = abs(self._position - self._target)
        reward = -1.0
        if distance == 0:
            reward = 1.0
        elif distance < old_distance:
            reward = 0.0
        is_cut = distance > 0 and self._turns >= 2 * self.args.max_position
        return StepResult(
            self._observe(),
            reward,
            distance == 0 or is_cut,
            action is not None,
            distance == 0,
            truncated=is_cut,
        )

    def text_frame(self) -> str:
        return self._observe().text

    def demonstrate(self, rng: np.random.Generator, noise: float) -> str:
        if rng.random() < noise:
            return "+-"[int(rng.integers(2))]
        return "+" if self._position < self._target else "-"

    def _observe(self) -> Observation:
        text = f"Target: {self._target}\nCurrent: {self._position}"
        return Observation(text, anchor=text)


@lru_cache(maxsize=16)
def _split_pairs(max_position: int, split: Split) -> tuple[tuple[int, int], ...]:
    """Return every pair of start and target, in the order of a hash; a quarter is held out."""
    places = range(max_position + 1)
    pairs = [(start, target) for start in places for target in places if start != target]
    pairs.sort(key=lambda pair: hashlib.blake2b(f"{pair[0]}/{pair[1]}".encode()).digest())
    num_held_out = max(len(pairs) // 4, 1)
    return tuple(pairs[:num_held_out] if split == "eval" else pairs[num_held_out:])
