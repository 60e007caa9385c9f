"""Serves one agent's episode: turns its requests into turns of the policy and records them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from array import array
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from broker.contract import wire
from broker.errors import ConfigError
from broker.runtime.spans import SpanRecorder
from envhub.agents.dialogue import dialogue_messages
from envhub.agents.record import EpisodeRecord, RecordedSample
from envhub.agents.sampled_answers import SampledAnswers
from envhub.lengths.base import UpcomingTurn
from envhub.lengths.predictor import LengthPrediction, LengthPredictor
from envhub.lengths.selection import task_key
from envhub.servers.turn import SampledTurn, TurnFailed, TurnRequest, mix
from envhub.task import EpisodeTask
from rlearner_text.incremental_tokenization import Conversation
from rlearner_text.openai import tool_calls
from rlearner_text.openai.answer_store import AnswerStore
from rlearner_text.openai.backends import ServedModel, refuse_long, refuse_overlong
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

# the openai client retries after this status
AGAIN_AT_ONCE = 503
# rendering more takes so long that the hub's loop must run
FEW_MESSAGES = 256


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
        refusal: why a call was refused, if the policy is to blame: ``truncated`` or ``length``.
        is_cut: whether the last answer ended because of its length.
        failure: why the last call failed, if no server answered it.
        generate_s: seconds that all calls took.
        num_pending: calls that wait for the policy.
    """

    def __init__(
        self, task: EpisodeTask, context: SessionContext, on_tokens: Callable[[int], None]
    ) -> None:
        self._task = task
        self._context = context
        self._on_tokens = on_tokens
        self._section = task.domain.section
        self.name = task.id  # in the access log
        closing, stops = _find_ends(context.tokenizer)
        self._stop_token_ids = stops
        self.record = EpisodeRecord(
            context.tokenizer, closing, stops, shows_anchors=task.domain.shows_anchors
        )
        self.served_model = ServedModel(
            task.policy,
            context.tokenizer.name,
            self._section.max_context_tokens,
            state=self._state,
            policy_version=self._version,
            any_model=True,
            top_logprobs=True,
        )
        self.answer_store = AnswerStore()
        self.refusal: wire.EpisodeEnd | None = None
        self.is_cut = False
        self.failure = ""
        self.generate_s = 0.0
        self.num_pending = 0
        self._answers = SampledAnswers(context.tokenizer)
        # those with sampled special tokens, which the record has to find again
        self._with_specials: list[str] = []
        self._num_calls = self._task_key = 0
        self._newest_version = -1
        self._is_over = False
        self._record_lock = asyncio.Lock()
        # calls by the prompt's tokens; each sample's last one, with its answer
        self._asked: dict[bytes, ChatBody] = {}
        self._answered: dict[int, tuple[ChatBody, str]] = {}

    def close(self) -> None:
        """Refuse further requests: they come from a process that should have ended."""
        self._is_over = True

    async def prompts(self, body: GenerationBody) -> list[Sequence[int]]:
        """Return the prompts' tokens; those that continue a sample begin with its exact tokens."""
        try:
            prompts = await self._encode_prompts(body)
        except HttpError as error:
            if error.code == "context_length_exceeded":
                self.refusal = "length"
            raise
        if any(len(prompt) >= self._section.max_context_tokens for prompt in prompts):
            # the server says so to the agent
            self.refusal = "length"
        if isinstance(body, ChatBody):
            self._answers.add_prompt(prompts[0], body)
            if self._task.domain.sends_messages:
                self._asked[array("i", prompts[0]).tobytes()] = body
        return prompts

    async def count_tokens(self, body: ChatBody) -> int:
        """Return the number of tokens of a prompt; an agent that only counts is not refused."""
        (prompt,) = await self._encode_prompts(body)
        return len(prompt)

    async def _encode_prompts(self, body: GenerationBody) -> list[Sequence[int]]:
        if self._is_over:
            raise HttpError(403, "the episode is over")
        refuse_long(body, self._section.max_context_tokens)
        # the record must not change while a thread reads it
        async with self._record_lock:
            is_short = not isinstance(body, ChatBody) or len(body.messages) <= FEW_MESSAGES
            if is_short and body.characters < LONG_TEXT:
                return self._encoded(body)
            return await asyncio.to_thread(self._encoded, body)

    def messages_of(self, sample: RecordedSample, first: int) -> list[wire.EpisodeMessage]:
        """Return the messages of a sample, if its last call was a chat and rewards may read them.

        Args:
            first: which turn of the episode is its first.
        """
        if sample.number not in self._answered:
            return []
        asked, text = self._answered[sample.number]
        answer = ChatMessage(role="assistant", content=text)
        if asked.offered:
            with contextlib.suppress(HttpError):
                syntax = tool_calls.tool_syntax(self._context.tokenizer)
                words, calls = tool_calls.split_calls(text, syntax, "")
                fields = {"role": "assistant", "content": words, "tool_calls": calls or None}
                answer = ChatMessage.model_validate(fields)
        return dialogue_messages([*asked.messages, answer], first, len(sample.turns))

    def _encoded(self, body: GenerationBody) -> list[Sequence[int]]:
        prompts: list[str] | list[list[int]]
        parameter = "messages" if isinstance(body, ChatBody) else "prompt"
        if isinstance(body, ChatBody):
            try:
                prompts = [self._rendered(body)]
            except ConfigError as error:
                raise HttpError(400, error.allowed, param=parameter) from None
        else:
            assert isinstance(body, CompletionBody)
            prompts = body.prompts()
        for prompt in prompts:
            if isinstance(prompt, str):
                refuse_overlong(
                    self._context.tokenizer,
                    prompt,
                    self._section.max_context_tokens,
                    parameter,
                )
        return [
            self.record.encode_prompt(prompt) if isinstance(prompt, str) else prompt
            for prompt in prompts
        ]

    def _rendered(self, body: ChatBody) -> str:
        """Return the prompt's text; answers that the agent sends back appear as they were
        sampled.
        """
        shield = self._context.tokenizer.shield
        shielded_messages = [self._shielded(shield, message) for message in body.messages]
        messages = list(shielded_messages)
        for place, text in self._answers.find_texts(body).items():
            messages[place] = {"role": "assistant", "content": text}
        tools = shield_values(shield, body.offered)
        try:
            # as sampled, so that the record finds the tokens of earlier answers
            return self._context.tokenizer.render_chat(messages, tools=tools)
        except ConfigError:
            # some templates need the calls that a tool answers
            return self._context.tokenizer.render_chat(shielded_messages, tools=tools)

    def _shielded(self, shield: Callable[[str], str], message: ChatMessage) -> dict[str, Any]:
        fields: dict[str, Any] = message.plain()
        shielded: dict[str, Any] = shield_values(shield, fields)
        content = fields["content"]
        is_answer = message.role == "assistant" and bool(content)
        if is_answer and any(content in text for text in self._with_specials):
            shielded["content"] = content
        return shielded

    async def handle(
        self, request: wire.GenerateRequest, listener: TokenListener | None = None, /
    ) -> wire.GenerateReply:
        """Sample one turn of the policy, which a server returns whole."""
        if self._num_calls >= self._section.max_turns:
            self.refusal = self.refusal or "truncated"
            raise HttpError(
                400, f"the episode's {self._section.max_turns} calls are used up", code="max_turns"
            )
        # before the wait: an agent may send several requests at once
        self._num_calls += 1
        if listener is not None and listener.top_logprobs:
            sampling = replace(request.sampling, top_logprobs=listener.top_logprobs)
            request = replace(request, sampling=sampling)
        else:
            listener = None
        prompt = array("i", request.token_ids.array().tolist())
        started_at = time.perf_counter()
        span = self._context.spans.enter("generate")
        self.num_pending += 1
        try:
            turn, prediction = self._turn_request(request, prompt)
            sampled = await self._context.turn(turn)
        except TurnFailed as error:
            self._num_calls -= 1
            self.failure = str(error)
            raise HttpError(AGAIN_AT_ONCE, f"the policy gave no answer: {error}") from None
        except BaseException:
            # the agent hung up
            self._num_calls -= 1
            raise
        finally:
            self._context.spans.leave("generate", span, self._task.ticket)
            self.generate_s += time.perf_counter() - started_at
            self.num_pending -= 1
        self.failure = ""
        if request.sampling.top_logprobs and not sampled.top:
            raise HttpError(
                400,
                "top_logprobs is not supported: the run's engine does not return the likeliest "
                "tokens",
                param="top_logprobs",
            )
        self._context.lengths.add(prediction, len(sampled.token_ids))
        async with self._record_lock:
            sample = self.record.add_turn(prompt, sampled)
        self.is_cut = sampled.finish_reason == "length"
        reply_id, _, index = request.request_id.removeprefix("http.").partition(".")
        text = tool_calls.text_with_markers(self._context.tokenizer, sampled.token_ids)
        prefix = tool_calls.prefix_of(reply_id, int(index))
        self._answers.add_answer(prefix, prompt, sampled.token_ids, request.sampling.stop)
        self._answered.pop(sample.number, None)
        if (asked := self._asked.get(prompt.tobytes())) is not None:
            self._answered[sample.number] = (asked, text)
        if text != self._context.tokenizer.decode(sampled.token_ids):
            self._with_specials.append(text)
        if versions := sampled.version_runs[::2]:
            self._newest_version = max(self._newest_version, *versions)
            self._on_tokens(min(versions))
        if listener is not None:
            listener.on_tokens(
                TokenEvent(
                    sampled.token_ids.tolist(),
                    sampled.logprobs.tolist(),
                    self._newest_version,
                    sampled.top,
                )
            )
        return wire.GenerateReply(
            request_id=request.request_id,
            server=sampled.server,
            token_ids=wire.column(sampled.token_ids, "<i4"),
            logprobs=wire.column(sampled.logprobs, "<f4"),
            version_runs=wire.column(sampled.version_runs, "<i4"),
            finish_reason=sampled.finish_reason,
            policy_version=max(versions, default=-1),
        )

    def _turn_request(
        self, request: wire.GenerateRequest, prompt: array[int]
    ) -> tuple[TurnRequest, LengthPrediction]:
        task = self._task
        section = self._section
        sampling = self._section.sampling
        base = self.record.find_continued(prompt)
        max_tokens = min(
            request.sampling.max_tokens,
            sampling.max_tokens,
            section.max_context_tokens - len(prompt),
        )
        self._task_key = self._task_key or task_key(prompt)
        last_turn = base.turns[-1] if base is not None else None
        upcoming = UpcomingTurn(
            prompt,
            max_tokens,
            task=self._task_key,
            turn=self._num_calls - 1,
            previous=last_turn.end - last_turn.start if last_turn else 0,
            task_index=task.task_index,
            split=task.split,
        )
        prediction = self._context.lengths.predict(upcoming)
        number = len(self.record.samples) if base is None else base.number
        turn = TurnRequest(
            episode=task.id,
            conversation_id=f"{task.id}.{number}",
            token_ids=prompt,
            sampling=wire.SamplingParams(
                max_tokens=max_tokens,
                temperature=sampling.temperature if task.temperature is None else task.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                min_p=sampling.min_p,
                seed=mix(*task.sampling_seeds, len(prompt), self._num_calls),
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
            sticky=last_turn.server if last_turn is not None else "",
            timeout_s=self._context.generate_timeout_s,
            expected_tokens=prediction.expected,
            expected_high=prediction.high,
            step=task.step,
        )
        return turn, prediction

    def _state(self) -> str:
        return "over" if self._is_over else "serving"

    def _version(self) -> int:
        return self._newest_version


def _find_ends(tokenizer: Tokenizer) -> tuple[Sequence[int], Sequence[int]]:
    """Return the tokens that close an answer, and those at which sampling should stop."""
    try:
        rules = Conversation(tokenizer).rules
    except ConfigError:
        # the template shows old turns differently from new ones, so nothing is joined
        return (), tokenizer.eos_token_ids
    return rules.closing, rules.stop_token_ids
