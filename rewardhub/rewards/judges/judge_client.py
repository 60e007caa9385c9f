"""Asks a language model at an OpenAI-compatible endpoint to judge, and reads its answers.

An answer that cannot be read is requested again, ``asks_again`` times. Equal requests are sent
once.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Generic, TypeVar

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from broker.errors import UserError
from broker.settings.config import Harmless, HttpUrl, Section
from broker.settings.secret import SecretRef
from rewardhub.rewards.base import NoScore, Sample
from rlearner_text.thinking import after_thinking

log = logging.getLogger(__name__)

T = TypeVar("T")

ENDPOINT_HARMLESS: Final = (
    "model", "system_prompt", "asks_again", "max_chars", "temperature", "max_tokens",
    "max_tokens_field", "max_concurrency", "timeout_s", "try_timeout_s", "retries", "backoff_s",
    "cache", "price_in", "price_out",
)  # fmt: skip


class JudgeEndpointArgs(Section):
    """Arguments of every reward that asks a judge."""

    harmless: ClassVar[Harmless] = ENDPOINT_HARMLESS

    base_url: HttpUrl  # for example http://127.0.0.1:8000/v1
    model: str | None = None  # required if the endpoint lists more than one
    # where the key is; the default need not be set
    api_key: SecretRef = SecretRef(env="OPENAI_API_KEY")
    system_prompt: str = ""
    asks_again: NonNegativeInt = 2  # if the answer cannot be read
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


class UnreadableAnswer(ValueError):
    """A judge's answer is not what it was asked for.

    Args:
        missing: what it lacks, ``score from 0 to 10`` for example.
        request: the message that asks for it again.
    """

    def __init__(self, missing: str, request: str) -> None:
        super().__init__(missing)
        self.missing = missing
        self.request = request


@dataclass(frozen=True)
class JudgeQuestion(Generic[T]):
    """A question to a judge.

    Attributes:
        text: the message of the user.
        read: returns what an answer says, without its thinking, or raises ``UnreadableAnswer``.
        truncated: whether the response is not sent as a whole.
        fields: further fields of the request.
    """

    text: str
    read: Callable[[str], T]
    truncated: bool = False
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class JudgeVerdict(Generic[T]):
    """What the judge's answer says, and the tokens used for it."""

    value: T
    tokens_in: int
    tokens_out: int
    num_asked: int


class JudgeClient(Generic[T]):
    """The connection to a judge, with its answers so far.

    Args:
        key: of the arguments, for messages.
    """

    def __init__(self, args: JudgeEndpointArgs, key: str = "rewards.args") -> None:
        self._args = args
        self._key = key
        self._known: OrderedDict[str, asyncio.Task[JudgeVerdict[T]]] = OrderedDict()
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
        key = secret.require(f"{self._key}.api_key", url) if is_named else secret.find(url)
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
                f"{self._key.removeprefix('rewards.')}.model"
            )
        self._model = self._model or names[0]
        tries = args.retries
        self._endpoint = EndpointClient(
            url, key, timeout_s=args.try_timeout_s, retries=tries, base_s=args.backoff_s
        )

    async def close(self) -> None:
        """Close the connections."""
        await self._endpoint.close()

    async def ask(self, question: JudgeQuestion[T], sample: Sample) -> tuple[T, dict[str, float]]:
        """Return what the judge says, and the notes ``tokens_in``, ``tokens_out`` and ``cost`` (0
        if cached), ``cached``, ``asked`` (number of requests) and ``truncated``.

        Raises:
            NoScore: if the endpoint refuses, or no answer can be read; names domain and task.
            RuntimeError: if no answer comes within the retries or in time.
        """
        messages = [{"role": "user", "content": question.text}]
        if self._args.system_prompt:
            messages = [{"role": "system", "content": self._args.system_prompt}, *messages]
        request = json.dumps([messages, dict(question.fields)])
        key = hashlib.sha256(request.encode()).hexdigest()
        task = self._known.get(key)
        cached = task is not None
        if task is None:
            task = asyncio.create_task(self._answer(messages, question))
            self._remember(key, task)
        try:
            verdict = await asyncio.shield(task)
        except NoScore as error:
            raise NoScore(f"domain {sample.domain!r}, task {sample.task_index}: {error}") from None
        except RuntimeError as error:
            raise RuntimeError(
                f"domain {sample.domain!r}, task {sample.task_index}: {_clean_text(error)}"
            ) from None
        return verdict.value, self._notes(verdict, cached=cached, truncated=question.truncated)

    def _notes(
        self, verdict: JudgeVerdict[T], *, cached: bool, truncated: bool
    ) -> dict[str, float]:
        paid = (0, 0) if cached else (verdict.tokens_in, verdict.tokens_out)
        return {
            "tokens_in": paid[0],
            "tokens_out": paid[1],
            "cost": (paid[0] * self._args.price_in + paid[1] * self._args.price_out) / 1e6,
            "cached": float(cached),
            "asked": float(0 if cached else verdict.num_asked),
            "truncated": float(truncated),
        }

    def _remember(self, key: str, task: asyncio.Task[JudgeVerdict[T]]) -> None:
        self._known[key] = task
        task.add_done_callback(lambda task: self._forget(key, task))

    def _forget(self, key: str, finished: asyncio.Task[JudgeVerdict[T]]) -> None:
        """Drop an answer that failed, and the oldest ones beyond the cache's size."""
        if finished.cancelled() or finished.exception() is not None:
            self._known.pop(key, None)
        while len(self._known) > self._args.cache and next(iter(self._known.values())).done():
            self._known.popitem(last=False)

    async def _answer(
        self, messages: list[dict[str, str]], question: JudgeQuestion[T]
    ) -> JudgeVerdict[T]:
        """Return the verdict within the time limit."""
        try:
            async with asyncio.timeout(self._args.timeout_s):
                return await self._converse(messages, question)
        except TimeoutError:
            raise RuntimeError(
                f"{self._args.base_url} sent no score within {self._args.timeout_s:g} s"
            ) from None

    async def _converse(
        self, messages: list[dict[str, str]], question: JudgeQuestion[T]
    ) -> JudgeVerdict[T]:
        from rlearner_text.openai.client import EndpointError

        answer = ""
        missing = ""
        tokens = [0, 0]
        for number in range(1, self._args.asks_again + 2):
            try:
                body = self._body(messages, question.fields)
                reply = await self._endpoint.post("/chat/completions", body)
            except EndpointError as error:
                raise NoScore(self._refused(error)) from None
            answer = _reply_text(reply)
            for index, name in enumerate(("prompt_tokens", "completion_tokens")):
                tokens[index] += _token_count(reply.get("usage"), name)
            try:
                # what the judge's thinking says is no verdict
                value = question.read(after_thinking(answer))
                return JudgeVerdict(value, tokens[0], tokens[1], number)
            except UnreadableAnswer as problem:
                missing = problem.missing
                request = problem.request
            messages = [
                *messages,
                {"role": "assistant", "content": answer},
                {"role": "user", "content": request},
            ]
        excerpt = " ".join(answer.split())[-120:]
        reason = f"the judge gave no {missing} in {self._args.asks_again + 1} answers"
        raise NoScore(f"{reason}; the last ends {excerpt!r}")

    def _body(self, messages: list[dict[str, str]], fields: Mapping[str, Any]) -> dict[str, Any]:
        args = self._args
        body: dict[str, Any] = {"messages": messages, "temperature": args.temperature}
        body |= {args.max_tokens_field: args.max_tokens, **fields, **args.extra_body}
        if self._model:
            body.setdefault("model", self._model)
        return {name: value for name, value in body.items() if value is not None}

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


def _token_count(usage: Any, name: str) -> int:
    count = usage.get(name) if isinstance(usage, dict) else None
    return count if isinstance(count, int) and count >= 0 else 0
