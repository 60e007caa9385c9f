"""Questions whose answers only tools know: Python functions, which the policy calls."""

import inspect
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from broker.settings.config import Section
from envhub.envs.base import Environment, Observation, StepResult
from rlearner_text.tool_calls import ToolCall

ITEMS = ("apples", "figs", "pears", "plums")
QUESTIONS = {"count": "How many {item} are left?", "price": "What do {item} cost?"}
TYPES = {int: "integer", float: "number", bool: "boolean", str: "string"}


class ShopArgs(Section):
    """``domains.shop.env_args``: unknown keys and wrong types are refused before a start."""

    largest: int = 9


class Shop(Environment):
    """One question; the policy calls ``count`` and ``price``, and answers with a number."""

    Args = ShopArgs

    def count(self, item: str) -> int:
        """Return how many pieces of an item are left."""
        return self.counts[item]

    def price(self, item: str) -> int:
        """Return what one piece of an item costs."""
        return self.prices[item]

    @classmethod
    def tools(cls, args: ShopArgs) -> list[dict[str, Any]]:
        """Describe the functions to the policy; the model's chat template shows them."""
        return [describe(cls.count), describe(cls.price)]

    def reset(self, task_index: int, split: str, seed: int) -> Observation:
        """Fill the shop: the same for equal arguments. ``split`` is "train" or "eval"."""
        rng = random.Random(f"{split} {task_index}")
        self.counts = {item: rng.randint(0, self.args.largest) for item in ITEMS}
        self.prices = {item: rng.randint(0, self.args.largest) for item in ITEMS}
        self.wanted = ToolCall(rng.choice(list(QUESTIONS)), {"item": rng.choice(ITEMS)})
        self.answer = self._call(self.wanted)
        self.metrics = {"calls": 0.0, "errors": 0.0}
        self.is_known = False
        return Observation(QUESTIONS[self.wanted.name].format(**self.wanted.arguments))

    def use(self, calls: Sequence[ToolCall]) -> StepResult:
        """Call functions. A wrong call is the policy's fault: it reads the error."""
        results = []
        for call in calls:
            self.metrics["calls"] += 1
            try:
                results.append(self._call(call))
            except (KeyError, TypeError, ValueError) as error:
                self.metrics["errors"] += 1
                results.append(f"error: {type(error).__name__}: {error}")
        self.is_known |= self.wanted in calls
        is_valid = not results[-1].startswith("error")
        shown = Observation("\n".join(results))
        return StepResult(shown, reward=0.0, done=False, valid=is_valid, metrics=self.metrics)

    def step(self, text: str) -> StepResult:
        """End with an answer. Text without a number is invalid, never an exception."""
        number = re.search(r"[0-9]{1,9}", text)
        if number is None:
            shown = Observation("A number!")
            return StepResult(shown, reward=0.0, done=False, valid=False, metrics=self.metrics)
        is_right = number[0] == self.answer
        return StepResult(
            Observation(""),
            reward=float(is_right),
            done=True,
            success=is_right,
            metrics=self.metrics,
        )

    def demonstrate(self, rng: np.random.Generator, noise: float) -> str | list[ToolCall]:
        """Return an action for the warm start; by chance (``noise``) a guess without a call."""
        if self.is_known:
            return self.answer
        if rng.random() < noise:
            return str(rng.integers(self.args.largest + 1))
        return [self.wanted]

    def _call(self, call: ToolCall) -> str:
        functions: dict[str, Callable[..., int]] = {"count": self.count, "price": self.price}
        return str(functions[call.name](**call.arguments))


def describe(function: Callable[..., Any]) -> dict[str, Any]:
    """Return a function's schema in OpenAI's form, from its docstring and annotations."""
    parameters = list(inspect.signature(function).parameters.values())[1:]
    schema = {
        "type": "object",
        "properties": {each.name: {"type": TYPES[each.annotation]} for each in parameters},
        "required": [each.name for each in parameters if each.default is each.empty],
    }
    about = {"name": function.__name__, "description": inspect.getdoc(function) or ""}
    return {"type": "function", "function": {**about, "parameters": schema}}
