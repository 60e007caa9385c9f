"""Scores responses with a language model at an OpenAI-compatible endpoint.

    rewards:
      - name: judge
        args: {base_url: "https://host/v1", model: NAME, api_key: {env: JUDGE_KEY}}

The judge writes ``Score: N`` somewhere, with N from ``low`` to ``high``, which is scaled to 0 to 1.
Without a score it is prompted again, ``asks_again`` times; an answer without a score never becomes
a reward. Equal requests are sent once.
"""

from __future__ import annotations

import math
import re
from typing import Annotated, ClassVar, Final, Self

from pydantic import AfterValidator, model_validator

from rewardhub.rewards.base import Sample, Scored
from rewardhub.rewards.judges.judge_client import (
    ENDPOINT_HARMLESS,
    JudgeClient,
    JudgeEndpointArgs,
    JudgeQuestion,
    UnreadableAnswer,
)
from rewardhub.rewards.judges.judge_template import check_template, fill_template

TEMPLATE: Final = """Judge how well the response answers the question.

[Question]
{prompt}

[Reference answer]
{reference}

[Response]
{response}

Say in a sentence or two what is right and wrong about it. End with a line `Score: N`, where N is \
a number from {low} to {high}."""
NUMBER: Final = r"(?i)score\W{0,5}(-?\d+(?:\.\d+)?)"


def _has_response(value: str) -> str:
    return check_template(value, "low", "high")


def _check_pattern(value: str) -> str:
    try:
        groups = re.compile(value).groups
    except re.error as error:
        raise ValueError(f"expected a regular expression: {error}") from None
    if groups != 1:
        raise ValueError(f"expected one group, the number, got {groups}")
    return value


class JudgeArgs(JudgeEndpointArgs):
    """Arguments of the reward ``judge``, besides those of its endpoint (``judge_client``)."""

    harmless = (*ENDPOINT_HARMLESS, "template", "low", "high")

    template: Annotated[str, AfterValidator(_has_response)] = TEMPLATE
    # the last match counts; its group is the number
    score_pattern: Annotated[str, AfterValidator(_check_pattern)] = NUMBER
    low: float = 0.0
    high: float = 10.0

    @model_validator(mode="after")
    def _range(self) -> Self:
        if not self.low < self.high:
            raise ValueError(f"high is {self.high:g}; it must be above low, which is {self.low:g}")
        return self


class JudgeReward:
    """Reward: the judge's score, scaled to 0 to 1.

    Notes: ``tokens_in``, ``tokens_out`` and ``cost`` of this score (0 if cached), ``cached``,
    ``asked`` (number of requests) and ``truncated``.

    Args:
        key: of the arguments, for messages.
    """

    Args = JudgeArgs
    concurrent: ClassVar[bool] = True

    def __init__(self, args: JudgeArgs, key: str = "rewards.args") -> None:
        self._args = args
        self._pattern = re.compile(args.score_pattern)
        self.client: JudgeClient[float] = JudgeClient(args, key)

    async def start(self) -> None:
        """Connect to the judge.

        Raises:
            UserError: see ``JudgeClient.start``.
        """
        await self.client.start()

    async def score(self, sample: Sample) -> Scored:
        """Return the reward of one response.

        Raises:
            NoScore: if the endpoint refuses, or the judge gives no score; names domain and task.
            RuntimeError: if no answer comes within the retries or in time.
        """
        args = self._args
        limits = {"low": f"{args.low:g}", "high": f"{args.high:g}"}
        text, truncated = fill_template(args.template, sample, args.max_chars, limits)
        score, notes = await self.client.ask(
            JudgeQuestion(text, self._read_score, truncated), sample
        )
        return Scored((score - args.low) / (args.high - args.low), notes)

    def _read_score(self, answer: str) -> float:
        args = self._args
        matches = self._pattern.findall(answer)
        try:
            number = float(matches[-1])
        except (IndexError, ValueError):
            number = math.nan
        if args.low <= number <= args.high:
            return number
        limits = f"from {args.low:g} to {args.high:g}"
        raise UnreadableAnswer(
            f"score {limits}",
            f"That holds no line `Score: N` with a number N {limits}. Answer with that line alone.",
        )
