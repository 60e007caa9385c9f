"""Whether the response has a form: a regular expression that it must match.

    rewards: [{name: format, weight: 0.1, args: {pattern: "<think>.*</think>\\s*<answer>.*</answer>"}}]

An expression may take very long on some text; the worker process is then killed like that of any reward.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator

from broker.settings.config import Section
from rewardhub.rewards.base import Sample


def _pattern(value: str) -> str:
    try:
        re.compile(value)
    except re.error as error:
        raise ValueError(f"it is no regular expression: {error}") from None
    return value


class FormatArgs(Section):
    """Arguments of the reward ``format``."""

    pattern: Annotated[str, AfterValidator(_pattern)]  # as Python's re has them; a dot matches line ends, too
    where: Literal["all", "start", "anywhere"] = "all"  # what must match: the whole response without blanks around it, its start, any part
    correct: float = 1.0  # reward of a response that matches
    wrong: float = 0.0  # reward of any other


class Format:
    """``correct`` when the response matches, else ``wrong``."""

    Args = FormatArgs

    def __init__(self, args: FormatArgs) -> None:
        self._args = args
        expression = re.compile(args.pattern, re.DOTALL)
        self._match = {"all": expression.fullmatch, "start": expression.match, "anywhere": expression.search}[args.where]

    def score(self, sample: Sample) -> float:
        """The reward of one response."""
        return self._args.correct if self._match(sample.response.strip()) else self._args.wrong
