"""Classes of a user's own that lack a method or have one with a wrong signature."""

from __future__ import annotations

from typing import Any

from broker.settings.config import Section
from envhub.envs.base import Environment, Observation, Split, StepResult


class NoStep(Environment):
    def reset(self, task_index: int, split: Split, seed: int) -> Observation:
        return Observation("go")


class ShortReset(NoStep):
    def reset(self, task_index: int) -> Observation:  # type: ignore[override]
        return Observation("go")

    def step(self, text: str) -> StepResult:
        return StepResult(Observation("done"), 1.0, done=True)


class NoUse(Environment):
    def reset(self, task_index: int, split: Split, seed: int) -> Observation:
        return Observation("go")

    def step(self, text: str) -> StepResult:
        return StepResult(Observation("done"), 1.0, done=True)

    @classmethod
    def tools(cls, args: Any) -> list[dict[str, Any]]:
        return [
            {
                "type": "function",
                "function": {"name": "f", "parameters": {"type": "object", "properties": {}}},
            }
        ]


class Whole(NoUse):
    def use(self, *calls: Any) -> StepResult:
        return StepResult(Observation("done"), 1.0, done=True)


class NoScore:
    Args = Section


class NoSample:
    Args = Section

    def score(self) -> float:
        return 1.0


class Plain:
    Args = Section

    def __init__(self, args: Section) -> None: ...

    @staticmethod
    def score(sample: Any) -> float:
        return 1.0
