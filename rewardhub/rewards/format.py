"""Checks whether a response matches a regular expression.

    rewards:
      - {name: format, weight: 0.1, args: {pattern: "<think>.*</think>\\s*<answer>.*</answer>"}}

A response on which matching takes longer than ``cpu_s`` does not match, with a note; it never voids
its group.
"""

from __future__ import annotations

import re
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, PositiveFloat

from broker.settings.config import Section
from rewardhub.bounded import BoundedFunction, TooCostly
from rewardhub.rewards.base import ResponseFault, Sample

MEMORY_MIB: Final = 512  # of the process that matches


def _check_pattern(value: str) -> str:
    try:
        re.compile(value)
    except re.error as error:
        raise ValueError(f"expected a regular expression: {error}") from None
    return value


class FormatArgs(Section):
    """Arguments of the reward ``format``."""

    harmless = ("pattern", "where", "correct", "wrong", "cpu_s")

    # in the syntax of Python's re; a dot also matches line ends
    pattern: Annotated[str, AfterValidator(_check_pattern)]
    where: Literal["all", "start", "anywhere"] = "all"  # what must match in the stripped response
    correct: float = 1.0  # reward of a response that matches
    wrong: float = 0.0  # reward of any other
    cpu_s: PositiveFloat = 1.0  # CPU seconds to match one response


class FormatReward:
    """``correct`` if the response matches, else ``wrong``; note ``too_costly`` beyond ``cpu_s``."""

    Args = FormatArgs

    def __init__(self, args: FormatArgs) -> None:
        self._args = args
        expression = re.compile(args.pattern, re.DOTALL)
        affixes = {
            "all": expression.fullmatch,
            "start": expression.match,
            "anywhere": expression.search,
        }
        match = affixes[args.where]

        def verdict(response: bytes) -> bytes:
            return b"matches" if match(response.decode("utf-8", "surrogatepass")) else b""

        self._bounded = BoundedFunction(verdict, cpu_s=args.cpu_s, memory_mib=MEMORY_MIB)

    def score(self, sample: Sample) -> float:
        """Return the reward of one response.

        Raises:
            ResponseFault: if matching takes too long.
        """
        try:
            matches = self._bounded(sample.response.strip().encode("utf-8", "surrogatepass"))
        except TooCostly:
            raise ResponseFault("too_costly", self._args.wrong) from None
        return self._args.correct if matches else self._args.wrong
