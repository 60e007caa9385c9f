"""Checks whether a response matches a regular expression.

    rewards: [{name: format, weight: 0.1, args: {pattern: "<think>.*</think>\\s*<answer>.*</answer>"}}]

If matching takes too long on some text, the worker process is killed, as for any reward.
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
        raise ValueError(f"expected a regular expression: {error}") from None
    return value


class FormatArgs(Section):
    """Arguments of the reward ``format``."""

    pattern: Annotated[str, AfterValidator(_pattern)]  # in the syntax of Python's re; a dot also matches line ends
    where: Literal["all", "start", "anywhere"] = "all"  # what must match in the stripped response
    correct: float = 1.0  # reward of a response that matches
    wrong: float = 0.0  # reward of any other


class FormatReward:
    """Reward: ``correct`` if the response matches, else ``wrong``."""

    Args = FormatArgs

    def __init__(self, args: FormatArgs) -> None:
        self._args = args
        expression = re.compile(args.pattern, re.DOTALL)
        where = {"all": expression.fullmatch, "start": expression.match, "anywhere": expression.search}
        self._match = where[args.where]

    def score(self, sample: Sample) -> float:
        """Return the reward of one response."""
        return self._args.correct if self._match(sample.response.strip()) else self._args.wrong
