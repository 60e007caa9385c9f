"""Generated word problems of one to four steps, by default one or two, answered by a number.

The reward is 1 if the last number of the reply is the result. Problems with the same amount at the
start and the same changes are one task, whatever their names, things and verbs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np
from pydantic import Field, model_validator

from broker.settings.config import Section
from envhub.envs.text.arithmetic import last_number
from envhub.envs.text.generated import GeneratedEnvironment, GeneratedTask

NAMES: Final = (
    "Anna",
    "Ben",
    "Clara",
    "David",
    "Emma",
    "Felix",
    "Grace",
    "Hugo",
    "Ida",
    "Jack",
    "Lena",
    "Noah",
)
THINGS: Final = (
    "apples",
    "books",
    "cards",
    "coins",
    "flowers",
    "marbles",
    "pencils",
    "shells",
    "stamps",
    "stones",
)
ASKING: Final = "How many {things} does {name} have now? Reply with the number only."
START: Final = "{name} has {amount} {things}."
GAINS: Final = (
    "{name} buys {amount} more.",
    "{name} finds {amount} more.",
    "A friend gives {name} {amount} more.",
)
LOSSES: Final = (
    "{name} gives away {amount}.",
    "{name} loses {amount}.",
    "{name} sells {amount}.",
)


class WordProblemsArgs(Section):
    """``env_args`` of ``word_problems``."""

    harmless = ("min_steps", "max_steps", "max_number")

    min_steps: Annotated[int, Field(ge=1, le=4)] = 1  # changes of the amount
    max_steps: Annotated[int, Field(ge=1, le=4)] = 2
    # of one change, and of the amount at the start
    max_number: Annotated[int, Field(ge=5, le=1000)] = 20

    @model_validator(mode="after")
    def _check_steps(self) -> WordProblemsArgs:
        if self.min_steps > self.max_steps:
            raise ValueError(
                f"min_steps is {self.min_steps}, more than max_steps, which is {self.max_steps}"
            )
        return self


class WordProblems(GeneratedEnvironment):
    """An amount and how it changes."""

    Args = WordProblemsArgs

    @classmethod
    def draw(cls, args: WordProblemsArgs, rng: np.random.Generator) -> GeneratedTask:
        name = NAMES[int(rng.integers(len(NAMES)))]
        things = THINGS[int(rng.integers(len(THINGS)))]
        amount = int(rng.integers(2, args.max_number + 1))
        sentences = [START.format(name=name, things=things, amount=amount)]
        identity = [str(amount)]
        for _ in range(int(rng.integers(args.min_steps, args.max_steps + 1))):
            is_loss = amount > 2 and rng.random() < 0.5
            # a loss leaves at least one thing
            limit = min(amount, args.max_number) if is_loss else args.max_number + 1
            change = int(rng.integers(1, limit))
            stories = LOSSES if is_loss else GAINS
            story = stories[int(rng.integers(len(stories)))]
            sentences.append(story.format(name=name, amount=change))
            signed_change = -change if is_loss else change
            amount += signed_change
            identity.append(f"{signed_change:+d}")
        question = " ".join([*sentences, ASKING.format(name=name, things=things)])
        return GeneratedTask(question, str(amount), " ".join(identity))

    @classmethod
    def example(cls, folder: Path) -> dict[str, Any]:
        return {"max_steps": 3}

    def is_valid(self, text: str) -> bool:
        return last_number(text) is not None

    def is_right(self, text: str) -> bool:
        return last_number(text) == self.task.reference
