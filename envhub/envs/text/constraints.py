"""Generated topics with IFEval's verifiable instructions, for the reward ``instruction_following``.

    Write about this topic: river. Include the keyword "river". Do not use any commas.

Each task has a row like those of google/IFEval: ``key``, ``prompt``, ``instruction_id_list`` and
``kwargs``. The environment itself gives no reward.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np
from pydantic import Field

from broker.settings.config import Section
from envhub.envs.base import Observation, Split, StepResult
from envhub.envs.text.generated import GeneratedEnvironment, GeneratedTask
from envhub.envs.text.instructions import TOPICS

END_PHRASE: Final = "That is all."
KEYWORD_ID: Final = "keywords:existence"


class ConstraintTasksArgs(Section):
    """``env_args`` of ``constraints``."""

    harmless = ("max_instructions",)

    # of a task, besides the one that demands the topic as a keyword
    max_instructions: Annotated[int, Field(ge=1, le=3)] = 2


class ConstraintTask(GeneratedTask, frozen=True):
    """A topic, and the ids and arguments of the instructions."""

    ids: list[str]
    kwargs: list[dict[str, Any]]


class Demand:
    """An instruction that small models can follow.

    Args:
        text: demands it; ``{number}`` is replaced.
        kwargs: IFEval's arguments for a number.
        apply: changes a reply in small letters without commas so that it follows.
        numbers: what it may count.
    """

    def __init__(
        self,
        text: str,
        kwargs: Callable[[int], dict[str, Any]],
        apply: Callable[[str, int], str],
        numbers: tuple[int, ...] = (0,),
    ) -> None:
        self.text = text
        self.kwargs = kwargs
        self.apply = apply
        self.numbers = numbers


# By IFEval's ids, in the order in which they are applied to a reply.
DEMANDS: Final[dict[str, Demand]] = {
    "detectable_format:number_bullet_lists": Demand(
        "Your answer must contain exactly {number} bullet points, such as: * This is a point.",
        lambda number: {"num_bullets": number},
        lambda reply, number: "\n".join([f"* {reply}"] * number),
        (2, 3),
    ),
    "detectable_content:number_placeholders": Demand(
        "The response must contain at least {number} placeholders in square brackets, such as "
        "[name].",
        lambda number: {"num_placeholders": number},
        lambda reply, number: reply + " [name]" * number,
        (1, 2),
    ),
    "detectable_format:title": Demand(
        "Your answer must contain a title, wrapped in double angular brackets, such as "
        "<<poem of joy>>.",
        lambda number: {},
        lambda reply, number: f"<<a title>>\n{reply}",
    ),
    "length_constraints:number_words": Demand(
        "Answer with less than {number} words.",
        lambda number: {"relation": "less than", "num_words": number},
        lambda reply, number: reply,
        (30, 40),
    ),
    "punctuation:no_comma": Demand(
        "Do not use any commas.", lambda number: {}, lambda reply, number: reply
    ),
    "change_case:english_lowercase": Demand(
        "Your entire response should be in English and in small letters only.",
        lambda number: {},
        lambda reply, number: reply,
    ),
    "startend:end_checker": Demand(
        f"Finish your response with this exact phrase: {END_PHRASE}",
        lambda number: {"end_phrase": END_PHRASE},
        lambda reply, number: f"{reply}\n{END_PHRASE.lower()}",
    ),
}


class ConstraintTasks(GeneratedEnvironment):
    """A topic and one to four instructions."""

    Args = ConstraintTasksArgs
    has_reward = False

    @classmethod
    def draw(cls, args: ConstraintTasksArgs, rng: np.random.Generator) -> ConstraintTask:
        topic = TOPICS[int(rng.integers(len(TOPICS)))]
        count = int(rng.integers(1, args.max_instructions + 1))
        places = sorted(rng.choice(len(DEMANDS), size=count, replace=False).tolist())
        ids = [list(DEMANDS)[place] for place in places]
        texts = [f"Write about this topic: {topic}.", f'Include the keyword "{topic}".']
        kwargs: list[dict[str, Any]] = [{"keywords": [topic]}]
        reply = f"this is the {topic}."
        for key in ids:
            demand = DEMANDS[key]
            number = demand.numbers[int(rng.integers(len(demand.numbers)))]
            texts.append(demand.text.format(number=number))
            kwargs.append(demand.kwargs(number))
            reply = demand.apply(reply, number)
        question = " ".join(texts)
        return ConstraintTask(
            question, reply, identity=question, ids=[KEYWORD_ID, *ids], kwargs=kwargs
        )

    @classmethod
    def example(cls, folder: Path) -> dict[str, Any]:
        return {"max_instructions": 3}

    def reset(self, task_index: int, split: Split, seed: int) -> Observation:
        observation = super().reset(task_index, split, seed)
        task = self.task
        assert isinstance(task, ConstraintTask)
        self.row = {
            "key": task.identity,
            "prompt": task.question,
            "instruction_id_list": task.ids,
            "kwargs": task.kwargs,
        }
        return observation

    def step(self, text: str) -> StepResult:
        return StepResult(Observation(""), reward=0.0, done=True, valid=bool(text.strip()))
