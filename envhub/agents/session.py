"""Serves one agent's episode: turns its requests into turns of the policy and records them."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from broker.contract import wire
from broker.errors import ConfigError
from broker.runtime.spans import SpanRecorder
from envhub.agents.record import EpisodeRecord
from envhub.lengths.base import UpcomingTurn
from envhub.lengths.predictor import LengthPrediction, LengthPredictor
from envhub.lengths.selection import task_key
from envhub.servers.generate import SampledTurn, TurnFailed, TurnRequest, mix
from envhub.task import EpisodeTask
from rlearner_text.incremental_tokenization import Conversation
from rlearner_text.openai import tool_calls
from rlearner_text.openai.answer_store import AnswerStore
from rlearner_text.openai.backends import ServedModel, refuse_long, refuse_overlong
from rlearner_text.openai.generation import REPLY_ID_CHARS
from rlearner_text.openai.http_errors import HttpError
from rlearner_text.openai.request_bodies import (
    ChatBody,
    ChatMessage,
    CompletionBody,
    GenerationBody,
)
from rlearner_text.openai.token_events import TokenEvent, TokenListener
from rlearner_text.special_text import shield_values
from rlearner_text.tokenizer import LONG_TEXT, Tokenizer

AGAIN_AT_ONCE = 503  # the openai client retries after this status
FEW_MESSAGES = 256  # rendering more takes so long that the hub's loop must run


@dataclass(frozen=True)
class SessionContext:
    """What a session samples turns with.

    Attributes:
        turn: samples one turn; see ``envhub.servers.generate.TurnGenerator``.
        lengths: of the turns of the domain.
        spans: of the hub.
    """

    tokenizer: Tokenizer
    turn: Callable[[TurnRequest], Awaitable[SampledTurn]]
    lengths: LengthPredictor
    generate_timeout_s: float
    spans: SpanRecorder


class AgentSession:
    """The ``rlearner_text.openai.backends.ApiBackend`` of one episode.

    Attributes:
        record: what was sampled.
        refused: why a call was refused, if the policy is to blame: ``truncated`` or ``length``.
        cut: whether the last answer ended because of its length.
        failed: why the last call failed, if no server answered it.
        generate_s: seconds that all calls took.
    """

    def __init__(
        self, task: EpisodeTask, means: SessionContext, on_tokens: Callable[[int], None]
    ) -> None:
        self._task = task
        self._means = means
        self._on_tokens = on_tokens
        self._section = task.domain.section
        self.name = task.id  # in the access log
        closing, stops = _ends(means.tokenizer)
        self._stop_token_ids = stops
        self.record = EpisodeRecord(means.tokenizer, closing, stops)
        names = (task.policy, means.tokenizer.name)
        limit = self._section.max_context_tokens
        self.served = ServedModel(
            *names, limit, self._state, self._version, any_model=True, top_logprobs=True
        )
        self.kept = AnswerStore()
        self.refused: wire.EpisodeEnd | None = None
        self.cut = False
        self.failed = ""
        self.generate_s = 0.0
        self._said: dict[str, str] = {}  # texts of answers, by the prefix of their calls' ids
        # those with sampled special tokens, which the record has to find again
        self._with_specials: list[str] = []
        self._begun = self._task_key = 0
        self._newest = -1
        self._over = False
        self._recording = asyncio.Lock()

    def close(self) -> None:
        """Refuse further requests: they come from a process that should have ended."""
        self._over = True

    async def prompts(self, body: GenerationBody) -> list[Sequence[int]]:
        """Return the prompts' tokens, beginning with the exact tokens of the samples that they
        continue.
        """
        if self._over:
            raise HttpError(403, "the episode is over")
        try:
            refuse_long(body, self._section.max_context_tokens)
        except HttpError:
            self.refused = "length"
            raise
        async with self._recording:  # the record must not change while a thread reads it
            is_short = not isinstance(body, ChatBody) or len(body.messages) <= FEW_MESSAGES
            if is_short and body.characters < LONG_TEXT:
                encoded = self._encoded(body)
            else:
                encoded = await asyncio.to_thread(self._encoded, body)
        if any(len(prompt) >= self._section.max_context_tokens for prompt in encoded):
            self.refused = "length"  # the server says so to the agent
        return encoded

    def _encoded(self, body: GenerationBody) -> list[Sequence[int]]:
        prompts: list[str] | list[list[int]]
        if isinstance(body, ChatBody):
            try:
                prompts = [self._rendered(body)]
            except ConfigError as error:
                raise HttpError(400, error.allowed, param="messages") from None
        else:
            assert isinstance(body, CompletionBody)
            prompts = body.prompts()
        for text in prompts:
            if isinstance(text, str):
                try:
                    refuse_overlong(
                        self._means.tokenizer, text, self._section.max_context_tokens, "messages"
                    )
                except HttpError:
                    self.refused = "length"
                    raise
        return [
            self.record.prompt(prompt) if isinstance(prompt, str) else prompt for prompt in prompts
        ]

    def _rendered(self, body: ChatBody) -> str:
        """Return the prompt's text; turns with unchanged tool calls appear as they were sampled."""
        shield = self._means.tokenizer.shield
        plain = [self._shielded(shield, message) for message in body.messages]
        messages = [
            self._as_said(message, body.most_calls, plain_message)
            for message, plain_message in zip(body.messages, plain, strict=True)
        ]
        tools = shield_values(shield, body.offered)
        try:
            return self._means.tokenizer.render_chat(messages, tools=tools)
        except ConfigError:  # some templates need the calls that a tool answers
            return self._means.tokenizer.render_chat(plain, tools=tools)

    def _shielded(self, shield: Callable[[str], str], message: ChatMessage) -> dict[str, Any]:
        plain: dict[str, Any] = message.plain()
        shielded: dict[str, Any] = shield_values(shield, plain)
        if (
            message.role == "assistant"
            and message.text
            and any(message.text in text for text in self._with_specials)
        ):
            shielded["content"] = plain["content"]
        return shielded

    def _as_said(
        self, message: ChatMessage, most_calls: int | None, plain: dict[str, Any]
    ) -> dict[str, Any]:
        if message.role == "assistant" and message.tool_calls:
            prefix = message.tool_calls[0].id[: len(tool_calls.prefix_of("x" * REPLY_ID_CHARS, 0))]
            if (text := self._said.get(prefix)) is not None:
                syntax = tool_calls.tool_syntax(self._means.tokenizer)
                words, calls = tool_calls.split_calls(text, syntax, prefix, most_calls)
                if (
                    words == message.text
                    and [call.model_dump() for call in message.tool_calls] == calls
                ):
                    return {"role": "assistant", "content": text}
        return plain

    async def handle(
        self, ask: wire.GenerateRequest, tap: TokenListener | None = None, /
    ) -> wire.GenerateReply:
        """Sample one turn of the policy, which a server returns whole."""
        if self._begun >= self._section.max_turns:
            self.refused = self.refused or "truncated"
            raise HttpError(
                400, f"the episode's {self._section.max_turns} calls are used up", code="max_turns"
            )
        self._begun += 1
        if tap is not None and tap.top_logprobs:
            sampling = replace(ask.sampling, top_logprobs=tap.top_logprobs)
            ask = replace(ask, sampling=sampling)
        else:
            tap = None
        prompt = array("i", ask.token_ids.array().tolist())
        started_at = time.perf_counter()
        began = self._means.spans.enter("generate")
        try:
            turn, predicted = self._ask(ask, prompt)
            sampled = await self._means.turn(turn)
        except TurnFailed as error:
            self._begun -= 1
            self.failed = str(error)
            raise HttpError(AGAIN_AT_ONCE, f"the policy gave no answer: {error}") from None
        except BaseException:
            self._begun -= 1  # the agent hung up
            raise
        finally:
            self._means.spans.leave("generate", began, self._task.ticket)
            self.generate_s += time.perf_counter() - started_at
        self.failed = ""
        if ask.sampling.top_logprobs and not sampled.top:
            problem = "top_logprobs is not supported: the run's engine does not return the likeliest tokens"
            raise HttpError(400, problem, param="top_logprobs")
        self._means.lengths.add(predicted, len(sampled.token_ids))
        async with self._recording:
            self.record.sampled(prompt, sampled)
        self.cut = sampled.finish_reason == "length"
        reply_id, _, index = ask.request_id.removeprefix("http.").partition(".")
        text = tool_calls.text_with_markers(self._means.tokenizer, sampled.token_ids)
        self._said[tool_calls.prefix_of(reply_id, int(index))] = text
        if text != self._means.tokenizer.decode(sampled.token_ids):
            self._with_specials.append(text)
        if versions := sampled.version_runs[::2]:
            self._newest = max(self._newest, *versions)
            self._on_tokens(min(versions))
        if tap is not None:
            tap.told(
                TokenEvent(
                    sampled.token_ids.tolist(), sampled.logprobs.tolist(), self._newest, sampled.top
                )
            )
        return wire.GenerateReply(
            request_id=ask.request_id,
            server=sampled.server,
            token_ids=wire.column(sampled.token_ids, "<i4"),
            logprobs=wire.column(sampled.logprobs, "<f4"),
            version_runs=wire.column(sampled.version_runs, "<i4"),
            finish_reason=sampled.finish_reason,
            policy_version=max(versions, default=-1),
        )

    def _ask(
        self, request: wire.GenerateRequest, prompt: array[int]
    ) -> tuple[TurnRequest, LengthPrediction]:
        task = self._task
        section = self._section
        sampling = self._section.sampling
        base = self.record.goes_on(prompt)
        most = min(
            request.sampling.max_tokens,
            sampling.max_tokens,
            section.max_context_tokens - len(prompt),
        )
        self._task_key = self._task_key or task_key(prompt)
        last = base.turns[-1] if base is not None else None
        place = (
            self._task_key,
            self._begun - 1,
            last.end - last.start if last else 0,
            task.task_index,
            task.split,
        )
        predicted = self._means.lengths.predict(UpcomingTurn(prompt, most, *place))
        turn = TurnRequest(
            episode=task.id,
            conversation_id=f"{task.id}.{len(self.record.samples) if base is None else base.number}",
            token_ids=prompt,
            sampling=wire.SamplingParams(
                max_tokens=most,
                temperature=sampling.temperature if task.temperature is None else task.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                min_p=sampling.min_p,
                seed=mix(task.seed, task.episode, len(prompt), self._begun),
                stop=[*sampling.stop, *request.sampling.stop],
                stop_token_ids=sorted({*self._stop_token_ids, *request.sampling.stop_token_ids}),
                frequency_penalty=request.sampling.frequency_penalty,
                presence_penalty=request.sampling.presence_penalty,
                logit_bias=request.sampling.logit_bias,
                guides=request.sampling.guides,
                top_logprobs=request.sampling.top_logprobs,
            ),
            policy=task.policy,
            min_version=task.min_version,
            sticky=last.server if last is not None else "",
            timeout_s=self._means.generate_timeout_s,
            expected_tokens=predicted.expected,
            expected_high=predicted.high,
            step=task.step,
        )
        return turn, predicted

    def _state(self) -> str:
        return "over" if self._over else "serving"

    def _version(self) -> int:
        return self._newest


def _ends(tokenizer: Tokenizer) -> tuple[Sequence[int], Sequence[int]]:
    """Return the tokens that close an answer, and those at which one should stop."""
    try:
        rules = Conversation(tokenizer).rules
    # the template shows old turns differently from new ones, so nothing is joined
    except ConfigError:
        return (), tokenizer.eos_token_ids
    return rules.closing, rules.stop_token_ids
