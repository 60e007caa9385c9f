"""Scores responses with a language model at an OpenAI-compatible endpoint.

    rewards:
      - name: judge
        args: {base_url: "https://host/v1", model: NAME, api_key: {env: JUDGE_KEY}}

The judge writes ``Score: N`` somewhere, with N from ``low`` to ``high``, which is scaled to 0 to 1.
Without a score it is prompted again, ``asks_again`` times; an answer without a score never becomes
a reward. Equal requests are sent once.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import re
from collections import OrderedDict
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final, Self

from pydantic import (
    AfterValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from broker.errors import UserError
from broker.settings.config import HttpUrl, Section
from broker.settings.secret import SecretRef
from rewardhub.rewards.base import NoScore, Sample, Scored
from rewardhub.rewards.conversation import conversation_text
from rlearner_text.thinking import after_thinking

log = logging.getLogger(__name__)

TEMPLATE: Final = """Judge how well the response answers the question.

[Question]
{prompt}

[Reference answer]
{reference}

[Response]
{response}

Say in a sentence or two what is right and wrong about it. End with a line `Score: N`, where N is \
a number from {low} to {high}."""
REPEATED_REQUEST: Final = (
    "That holds no line `Score: N` with a number N from {low} to {high}. Answer with "
    "that line alone."
)
SLOTS: Final = re.compile(r"\{(prompt|response|conversation|reference|low|high)\}")
NUMBER: Final = r"(?i)score\W{0,5}(-?\d+(?:\.\d+)?)"


def _has_response(value: str) -> str:
    if "{response}" not in value and "{conversation}" not in value:
        raise ValueError(
            "it must hold {response} or {conversation}; also allowed: {prompt}, {reference}, "
            "{low}, {high}"
        )
    return value


def _check_pattern(value: str) -> str:
    try:
        groups = re.compile(value).groups
    except re.error as error:
        raise ValueError(f"expected a regular expression: {error}") from None
    if groups != 1:
        raise ValueError(f"expected one group, the number, got {groups}")
    return value


class JudgeArgs(Section):
    """Arguments of the reward ``judge``."""

    harmless = (
        "model", "system_prompt", "template", "low", "high", "asks_again", "max_chars",
        "temperature", "max_tokens", "max_tokens_field", "max_concurrency", "timeout_s",
        "try_timeout_s", "retries", "backoff_s", "cache", "price_in", "price_out",
    )  # fmt: skip

    base_url: HttpUrl  # for example http://127.0.0.1:8000/v1
    model: str | None = None  # required if the endpoint lists more than one
    # where the key is; the default need not be set
    api_key: SecretRef = SecretRef(env="OPENAI_API_KEY")
    system_prompt: str = ""
    template: Annotated[str, AfterValidator(_has_response)] = TEMPLATE
    # the last match counts; its group is the number
    score_pattern: Annotated[str, AfterValidator(_check_pattern)] = NUMBER
    low: float = 0.0
    high: float = 10.0
    asks_again: NonNegativeInt = 2  # if the answer holds no score, or one out of range
    # sent of the end of response or conversation; the note ``truncated`` is 1 if it is longer
    max_chars: PositiveInt = 100_000
    temperature: NonNegativeFloat = 0.0
    max_tokens: PositiveInt = 1024
    max_tokens_field: str = "max_tokens"  # or max_completion_tokens, if the endpoint requires it
    # fields that override those sent; null removes one
    extra_body: dict[str, Any] = Field(default_factory=dict)
    max_concurrency: PositiveInt = 16  # requests at once
    timeout_s: PositiveFloat = 180.0  # one score, retries and pauses included
    try_timeout_s: PositiveFloat = 60.0  # one try
    retries: NonNegativeInt = 4  # after 408, 409, 429, 5xx and broken connections
    backoff_s: PositiveFloat = 0.5  # before the first retry, doubled for each further one
    cache: NonNegativeInt = 10_000  # cached answers
    # of a million tokens sent, in any currency, for the note ``cost``
    price_in: NonNegativeFloat = 0.0
    price_out: NonNegativeFloat = 0.0  # of a million tokens received

    @model_validator(mode="after")
    def _range(self) -> Self:
        if not self.low < self.high:
            raise ValueError(f"high is {self.high:g}; it must be above low, which is {self.low:g}")
        return self


@dataclass(frozen=True)
class JudgeVerdict:
    """The judge's score, from low to high, and the tokens used for it."""

    score: float
    tokens_in: int
    tokens_out: int
    num_asked: int


class JudgeReward:
    """Reward: the judge's score, scaled to 0 to 1.

    Notes: ``tokens_in``, ``tokens_out`` and ``cost`` of this score (0 if cached), ``cached``,
    ``asked`` (number of requests) and ``truncated``.
    """

    Args = JudgeArgs
    concurrent: ClassVar[bool] = True

    def __init__(self, args: JudgeArgs) -> None:
        self._args = args
        self._pattern = re.compile(args.score_pattern)
        self._known: OrderedDict[str, asyncio.Task[JudgeVerdict]] = OrderedDict()
        self._model = args.model or ""

    async def start(self) -> None:
        """Check the API key, choose the model, open connections; the endpoint may be down.

        Raises:
            UserError: if the key is missing or the endpoint rejects it, or serves several models
                and none is named.
        """
        from rlearner_text.openai.client import EndpointClient, EndpointError

        args = self._args
        is_named = "api_key" in args.model_fields_set
        url = args.base_url
        secret = args.api_key
        key = secret.require("rewards.args.api_key", url) if is_named else secret.find(url)
        first = EndpointClient(
            args.base_url, key, timeout_s=args.try_timeout_s, retries=0, base_s=args.backoff_s
        )
        try:
            listed = (await first.get("/models")).get("data")
        except EndpointError as error:
            if error.status in (401, 403):
                raise UserError(self._refused(error)) from None
            # Not every endpoint lists its models.
            listed = None
        except RuntimeError as error:
            log.warning("judge: %s; trying again at the first response", _clean_text(error))
            listed = [{"id": args.model}] if args.model else [{"id": ""}]
        finally:
            await first.close()
        names = (
            [str(model.get("id")) for model in listed if isinstance(model, dict)]
            if isinstance(listed, list)
            else []
        )
        if not self._model and len(names) != 1:
            raise UserError(
                f"{args.base_url} serves {', '.join(names) or 'no model that it lists'}; set "
                "args.model"
            )
        self._model = self._model or names[0]
        tries = args.retries
        self._endpoint = EndpointClient(
            url, key, timeout_s=args.try_timeout_s, retries=tries, base_s=args.backoff_s
        )

    async def score(self, sample: Sample) -> Scored:
        """Return the reward of one response.

        Raises:
            NoScore: if the endpoint refuses, or the judge gives no score; names domain and task.
            RuntimeError: if no answer comes within the retries or in time.
        """
        messages, truncated = self._messages(sample)
        key = hashlib.sha256(json.dumps(messages).encode()).hexdigest()
        task = self._known.get(key)
        cached = task is not None
        if task is None:
            task = asyncio.create_task(self._ask(messages))
            self._remember(key, task)
        try:
            verdict = await asyncio.shield(task)
        except NoScore as error:
            raise NoScore(f"domain {sample.domain!r}, task {sample.task_index}: {error}") from None
        except RuntimeError as error:
            raise RuntimeError(
                f"domain {sample.domain!r}, task {sample.task_index}: {_clean_text(error)}"
            ) from None
        args = self._args
        paid = (0, 0) if cached else (verdict.tokens_in, verdict.tokens_out)
        notes = {
            "tokens_in": paid[0],
            "tokens_out": paid[1],
            "cost": (paid[0] * args.price_in + paid[1] * args.price_out) / 1e6,
            "cached": float(cached),
            "asked": float(0 if cached else verdict.num_asked),
            "truncated": float(truncated),
        }
        return Scored((verdict.score - args.low) / (args.high - args.low), notes)

    def _remember(self, key: str, task: asyncio.Task[JudgeVerdict]) -> None:
        self._known[key] = task
        task.add_done_callback(lambda task: self._forget(key, task))

    def _forget(self, key: str, finished: asyncio.Task[JudgeVerdict]) -> None:
        """Drop an answer that failed, and the oldest ones beyond the cache's size."""
        if finished.cancelled() or finished.exception() is not None:
            self._known.pop(key, None)
        while len(self._known) > self._args.cache and next(iter(self._known.values())).done():
            self._known.popitem(last=False)

    def _messages(self, sample: Sample) -> tuple[list[dict[str, str]], bool]:
        args = self._args
        conversation = conversation_text(sample) if "{conversation}" in args.template else ""
        truncated = max(len(sample.response), len(conversation)) > args.max_chars
        slots = {
            "prompt": sample.prompt,
            "response": sample.response[-args.max_chars :],
            "conversation": conversation[-args.max_chars :],
            "reference": sample.reference or "(none)",
            "low": f"{args.low:g}",
            "high": f"{args.high:g}",
        }
        # One substitution: slots in the policy's text are never replaced.
        question = SLOTS.sub(lambda slot: slots[slot[1]], args.template)
        system = [{"role": "system", "content": args.system_prompt}] if args.system_prompt else []
        return [*system, {"role": "user", "content": question}], truncated

    async def _ask(self, messages: list[dict[str, str]]) -> JudgeVerdict:
        """Return the verdict within the time limit."""
        try:
            async with asyncio.timeout(self._args.timeout_s):
                return await self._converse(list(messages))
        except TimeoutError:
            raise RuntimeError(
                f"{self._args.base_url} sent no score within {self._args.timeout_s:g} s"
            ) from None

    async def _converse(self, messages: list[dict[str, str]]) -> JudgeVerdict:
        from rlearner_text.openai.client import EndpointError

        args = self._args
        answer = ""
        tokens = [0, 0]
        for number in range(1, args.asks_again + 2):
            try:
                reply = await self._endpoint.post("/chat/completions", self._body(messages))
            except EndpointError as error:
                raise NoScore(self._refused(error)) from None
            answer = _reply_text(reply)
            for index, field in enumerate(("prompt_tokens", "completion_tokens")):
                tokens[index] += _token_count(reply.get("usage"), field)
            if (score := self._score(answer)) is not None:
                return JudgeVerdict(score, tokens[0], tokens[1], number)
            repetition = SLOTS.sub(lambda slot: f"{getattr(args, slot[1]):g}", REPEATED_REQUEST)
            messages += [
                {"role": "assistant", "content": answer},
                {"role": "user", "content": repetition},
            ]
        excerpt = " ".join(answer.split())[-120:]
        reason = (
            f"the judge gave no score from {args.low:g} to {args.high:g} in "
            f"{args.asks_again + 1} answers"
        )
        raise NoScore(f"{reason}; the last ends {excerpt!r}")

    def _body(self, messages: list[dict[str, str]]) -> dict[str, Any]:
        args = self._args
        body: dict[str, Any] = {"messages": messages, "temperature": args.temperature}
        body |= {args.max_tokens_field: args.max_tokens, **args.extra_body}
        if self._model:
            body.setdefault("model", self._model)
        return {name: value for name, value in body.items() if value is not None}

    def _score(self, answer: str) -> float | None:
        # a number in the judge's thinking is no verdict
        matches = self._pattern.findall(after_thinking(answer))
        try:
            number = float(matches[-1])
        except (IndexError, ValueError):
            return None
        return number if self._args.low <= number <= self._args.high else None

    def _refused(self, error: Exception) -> str:
        problem = f"{self._args.base_url}: {_clean_text(error)}"
        status = getattr(error, "status", 0)
        return (
            f"{problem}; its key is taken from {self._args.api_key}"
            if status in (401, 403)
            else problem
        )


def _clean_text(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _reply_text(reply: dict[str, Any]) -> str:
    """Return the text of the first choice, or an empty one."""
    try:
        content = reply["choices"][0]["message"]["content"]
    except (KeyError, IndexError, TypeError):
        return ""
    return content if isinstance(content, str) else ""


def _token_count(usage: Any, field: str) -> int:
    count = usage.get(field) if isinstance(usage, dict) else None
    return count if isinstance(count, int) and count >= 0 else 0
