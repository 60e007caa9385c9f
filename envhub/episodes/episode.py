"""Plays one episode, token in, token out: observes, samples and acts until it ends."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from broker.contract import wire
from broker.system.fault import told, trace
from envhub.envs.base import Environment, Observation, StepResult
from envhub.episodes.conversation_log import ConversationLog
from envhub.episodes.frames import first_frame, frame
from envhub.lengths.base import UpcomingTurn
from envhub.lengths.predictor import LengthPredictor
from envhub.lengths.selection import task_key
from envhub.servers.turn import SampledTurn, TurnRequest, stirred
from envhub.task import EpisodeFailed, EpisodeResult, EpisodeTask, PromptText
from envhub.workers.returned import observation, row, step_result, text
from rlearner_text.incremental_tokenization import Conversation
from rlearner_text.template_rules import Role, rules_for
from rlearner_text.thinking import without_thinking
from rlearner_text.tokenizer import CHARS_PER_TOKEN, LONG_TEXT, Tokenizer
from rlearner_text.tool_calls import ToolCall, ToolCallError


class TurnSampler(Protocol):
    """What samples turns; see ``envhub.servers.generate.TurnGenerator``."""

    async def turn(self, ask: TurnRequest) -> SampledTurn: ...
    def forget(self, episode: str) -> None: ...


class WorkCurve(Protocol):
    """What measures an environment's calls; see ``broker.runtime.load_curve.LoadCurve``."""

    def enter(self, now: float) -> Any: ...
    def leave(self, piece: Any, now: float, units: float) -> None: ...


class EpisodeCalls(Protocol):
    """What calls the environment; see ``envhub.workers.calls.EnvironmentCalls``."""

    @property
    def curve(self) -> WorkCurve: ...
    async def call(self, environment: Environment, method: str, *args: Any) -> Any: ...


class WorkSpans(Protocol):
    """What records the episode's work; see ``broker.runtime.spans.SpanRecorder``."""

    def enter(self, kind: wire.SpanKind, step: int = -1) -> float: ...
    def leave(self, kind: wire.SpanKind, began: float, ticket: int = 0, step: int = -1) -> None: ...


@dataclass(frozen=True)
class EpisodeContext:
    """What an episode is played with.

    Attributes:
        lengths: of the turns of the domain.
        generate_timeout_s: longest wait for a turn.
        spans: of the hub.
    """

    tokenizer: Tokenizer
    turns: TurnSampler
    calls: EpisodeCalls
    lengths: LengthPredictor
    generate_timeout_s: float
    spans: WorkSpans


class Episode:
    """One episode from its reset on; see ``envhub.episodes.runners.EpisodeRunners.play`` for
    ``on_tokens``.
    """

    def __init__(
        self,
        task: EpisodeTask,
        environment: Environment,
        context: EpisodeContext,
        on_tokens: Callable[[int], None],
    ) -> None:
        self._context = context
        self._task = task
        self._env = environment
        self._on_tokens = on_tokens
        self._section = task.domain.section
        self._steps = task.domain.steps()
        self._opening = task.domain.opening
        self._conversations: list[Conversation] = []
        self._prompts: list[PromptText] = []  # of the conversations
        # each turn's seed is made of this one and the length of its context
        self._seed = stirred(0, *task.sampling_seeds)
        self._turns: list[wire.Turn] = []
        self._frames: list[str] = []
        self._generate_s = self._env_step_s = 0.0
        self._num_chars = 0
        self._server = self._response = ""
        self._calls: list[ToolCall] = []  # of this turn
        self._task_key = self._previous_tokens = 0  # for the prediction of lengths
        self._role: Role = "user"  # of the next message
        self._log = ConversationLog(task.domain)
        self._row: dict[str, Any] = {}

    async def run(self) -> EpisodeResult:
        """Play the episode.

        Raises:
            EpisodeFailed: if its prompt does not fit, its memory fails, or its texts are too large.
        """
        view = await self._reset()
        limit = self._section.max_context_tokens
        if (size := len(view.text)) > limit * CHARS_PER_TOKEN:
            raise EpisodeFailed(
                "fatal", f"the prompt has {size} characters and max_context_tokens is {limit}"
            )
        if view.history:
            self._opening = self._task.domain.opening_after(view.history)
        prompt = view.text
        if self._steps is not None:
            prompt = self._make_prompt(self._steps.open, view.text)
        await self._encode_ahead(prompt)
        self._observe(prompt)
        self._log.open(view.text, view.history)
        if (size := len(self._conversation)) >= limit:
            raise EpisodeFailed(
                "fatal", f"the prompt has {size} tokens and max_context_tokens is {limit}"
            )
        while True:
            sampled = await self._sample()
            self._response = self._conversation.rules.text(sampled.token_ids)
            action = self._response
            if self._section.thinking == "drop":
                action = without_thinking(self._response)
            step = await self._act(action, sampled)
            start, end = self._conversation.spans[-1]
            self._turns.append(
                wire.Turn(
                    start=start,
                    end=end,
                    reward=step.reward,
                    valid=step.valid,
                    finish_reason=sampled.finish_reason,
                    server=sampled.server,
                    anchor=view.anchor,
                )
            )
            self._log.add_turn(self._response, self._calls)
            view = step.observation
            if (end_reason := self._end_reason(step)) is not None:
                return self._result(step, end_reason)
            prompt = view.text
            if self._steps is not None:
                prompt = self._make_prompt(self._steps.acted, action, view.text)
            await self._encode_ahead(prompt)
            if not self._fits(prompt):
                return self._result(step, "length")
            self._observe(prompt)
            self._log.add_observation(self._role, view.text)

    @property
    def _conversation(self) -> Conversation:
        return self._conversations[-1]

    def _make_prompt(self, remember: Callable[..., str], *texts: str) -> str:
        """Return the prompt that the domain's memory makes."""
        try:
            return remember(*texts)
        except Exception as error:
            # it may be the user's code
            raise EpisodeFailed(
                "fatal", f"memory {self._section.memory}: {told(error)}", trace(error)
            ) from error

    async def _encode_ahead(self, prompt: str) -> None:
        """Encode a long prompt in a thread; the hub's loop then finds its tokens in the cache."""
        if not LONG_TEXT <= len(prompt) <= self._section.max_context_tokens * CHARS_PER_TOKEN:
            return
        rules = rules_for(self._context.tokenizer, *self._opening)
        if self._steps is not None or not self._conversations:
            await asyncio.to_thread(rules.start, prompt)
        else:
            await asyncio.to_thread(rules.delta, prompt, self._role)

    def _observe(self, prompt: str) -> None:
        if self._steps is not None or not self._conversations:
            self._conversations.append(Conversation(self._context.tokenizer, *self._opening))
            self._conversation.observe(prompt)
            self._prompts.append(PromptText(self._opening, prompt))
        else:
            self._conversation.observe(prompt, self._role)

    def _fits(self, prompt: str) -> bool:
        """Return whether the next prompt leaves room for an answer."""
        limit = self._section.max_context_tokens
        if self._steps is not None:
            return (
                len(prompt) <= limit * CHARS_PER_TOKEN
                and len(self._conversation.rules.start(prompt)) < limit
            )
        room = limit - len(self._conversation)
        return (
            len(prompt) <= room * CHARS_PER_TOKEN
            and self._conversation.cost_of(prompt, self._role) < room
        )

    def _end_reason(self, step: StepResult) -> wire.EpisodeEnd | None:
        if step.done and not step.truncated:
            return "terminated"
        if step.done or len(self._turns) >= self._section.max_turns:
            return "truncated"
        return None

    async def _sample(self) -> SampledTurn:
        conversation = self._conversation
        task = self._task
        sampling = self._sampling()
        self._task_key = self._task_key or task_key(conversation.token_ids)
        upcoming = UpcomingTurn(
            conversation.token_ids,
            sampling.max_tokens,
            task=self._task_key,
            turn=len(self._turns),
            previous=self._previous_tokens,
            task_index=task.task_index,
            split=task.split,
        )
        prediction = self._context.lengths.predict(upcoming)
        request = TurnRequest(
            episode=task.id,
            conversation_id=(
                task.conversation
                if self._steps is None
                else f"{task.conversation}.{len(self._turns)}"
            ),
            token_ids=conversation.token_ids,
            sampling=sampling,
            policy=task.policy,
            min_version=task.min_version,
            sticky=self._server,
            timeout_s=self._context.generate_timeout_s,
            expected_tokens=prediction.expected,
            expected_high=prediction.high,
            step=task.step,
        )
        started_at = time.perf_counter()
        span = self._context.spans.enter("generate")
        try:
            sampled = await self._context.turns.turn(request)
        finally:
            self._context.spans.leave("generate", span, task.ticket)
        self._generate_s += time.perf_counter() - started_at
        self._server = sampled.server
        self._previous_tokens = len(sampled.token_ids)
        self._context.lengths.add(prediction, self._previous_tokens)
        conversation.sampled(sampled.token_ids, sampled.logprobs, sampled.version_runs)
        if sampled.version_runs:
            self._on_tokens(min(sampled.version_runs[::2]))
        return sampled

    def _sampling(self) -> wire.SamplingParams:
        section = self._section.sampling
        task = self._task
        conversation = self._conversation
        length = len(conversation)
        seed = stirred(self._seed, length)
        # contexts of several turns may have the same length
        if self._steps is not None:
            seed = stirred(seed, len(self._turns))
        return wire.SamplingParams(
            max_tokens=min(section.max_tokens, self._section.max_context_tokens - length),
            temperature=section.temperature if task.temperature is None else task.temperature,
            top_p=section.top_p,
            top_k=section.top_k,
            min_p=section.min_p,
            seed=seed >> 16,
            stop=section.stop,
            stop_token_ids=list(conversation.rules.stop_token_ids),
        )

    async def _reset(self) -> Observation:
        task = self._task
        view = observation(
            "reset", await self._call("reset", task.task_index, task.split, task.seed)
        )
        prompt = text("after reset, prompt", self._env.prompt)
        # Equal tasks begin in equal states, also where the first observation is empty.
        view = self._with_anchor(view, view.text or prompt)
        self._count_chars(view.text, view.anchor, *(content for _, content in view.history))
        self._count_chars(
            prompt,
            text("after reset, reference", self._env.reference),
        )
        if task.domain.sends_messages:
            self._row = row("after reset, row", self._env.row)
        if task.record:
            self._record(first_frame(task.task_index, task.split, task.seed, await self._look()))
        return view

    async def _act(self, action: str, sampled: SampledTurn) -> StepResult:
        """Pass the policy's text or tool calls to the environment; reply to an unreadable call."""
        self._calls = []
        if not self._task.domain.tools:
            return await self._step("step", action, action)
        # some models write calls with special tokens
        text_with_specials = self._context.tokenizer.decode(
            sampled.token_ids, skip_special_tokens=False
        )
        try:
            calls = self._conversation.rules.calls(without_thinking(text_with_specials))
        except ToolCallError as error:
            self._role = "tool"
            return StepResult(Observation(f"error: {error}"), 0.0, done=False, valid=False)
        if calls:
            self._role = "tool"
            self._calls = calls
            return await self._step("use", action, calls)
        self._role = "user"
        return await self._step("step", action, action)

    async def _step(self, method: str, action: str, argument: Any) -> StepResult:
        step = step_result(await self._call(method, argument), method)
        view = step.observation
        step = msgspec.structs.replace(step, observation=self._with_anchor(view, view.text))
        self._count_chars(step.observation.text, step.observation.anchor)
        if self._task.record:
            self._record(frame(action, await self._look()))
        return step

    def _with_anchor(self, view: Observation, shown: str) -> Observation:
        """Return an observation with an anchor: its own, else what is shown, if the domain says."""
        if view.anchor or not self._task.domain.shows_anchors:
            return view
        return msgspec.structs.replace(view, anchor=shown)

    async def _look(self) -> str:
        return text("text_frame returned what", await self._call("text_frame"))

    def _record(self, frame_text: str) -> None:
        self._count_chars(frame_text)
        self._frames.append(frame_text)

    def _count_chars(self, *texts: str) -> None:
        """Bound the texts of an episode: a larger group could not be sent."""
        self._num_chars += sum(map(len, texts))
        if self._num_chars > wire.MAX_PAYLOAD_BYTES:
            raise EpisodeFailed(
                "large",
                f"its observations and anchors have {self._num_chars} characters, "
                f"the limit is {wire.MAX_PAYLOAD_BYTES}",
            )

    async def _call(self, method: str, *args: Any) -> Any:
        started_at = time.perf_counter()
        span = self._context.spans.enter("env_step")
        piece = self._context.calls.curve.enter(started_at)
        is_done = False
        try:
            result = await self._context.calls.call(self._env, method, *args)
            is_done = True
            return result
        finally:
            self._context.calls.curve.leave(piece, time.perf_counter(), is_done)
            self._context.spans.leave("env_step", span, self._task.ticket)
            self._env_step_s += time.perf_counter() - started_at

    def _result(self, step: StepResult, end: wire.EpisodeEnd) -> EpisodeResult:
        turns = self._turns
        reward = math.fsum(turn.reward for turn in turns)
        valid_rate = sum(turn.valid for turn in turns) / len(turns)
        metrics = {**step.metrics, "valid_action_rate": valid_rate, "num_turns": float(len(turns))}
        parts = [turns] if self._steps is None else [[turn] for turn in turns]
        last = len(parts) - 1
        trajectories = [
            wire.Trajectory(
                episode=self._task.episode,
                token_ids=wire.column(conversation.token_ids, "<i4"),
                loss_mask=wire.column(conversation.loss_mask, "|u1"),
                logprobs=wire.column(conversation.logprobs, "<f4"),
                version_runs=wire.column(conversation.version_runs, "<i4"),
                turns=own_turns,
                reward=reward,
                reward_parts={"env": reward} if self._task.domain.environment.has_reward else {},
                success=step.success,
                end=end,
                response=self._response if index == last else "",
                metrics=metrics if index == last else {},
                greedy=self._task.greedy,
                messages=self._log.messages * (index == last),
            )
            for index, (conversation, own_turns) in enumerate(
                zip(self._conversations, parts, strict=True)
            )
        ]
        env = self._env
        return EpisodeResult(
            trajectories,
            env.prompt,
            env.reference,
            generate_s=self._generate_s,
            env_step_s=self._env_step_s,
            frames=self._frames,
            row=self._row,
            prompts=self._prompts,
        )
