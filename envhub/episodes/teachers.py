"""Has a domain's teacher score the tokens that the policy sampled, on the teacher's servers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from broker.contract import wire
from broker.runtime.spans import SpanRecorder
from broker.settings.run_settings import RunSettings
from broker.settings.schema.teaching import TeacherSection
from envhub.episodes.translated_turn import TranslatedTurn
from envhub.servers.turn import SampledTurn, TurnFailed, TurnRequest
from envhub.task import EpisodeFailed, EpisodeResult, EpisodeTask, PromptText
from rlearner_text.template_rules import rules_for
from rlearner_text.tokenizer import Tokenizer


class ContextScorer(Protocol):
    """What has servers score a context; see ``envhub.servers.generate.TurnGenerator``."""

    async def turn(self, ask: TurnRequest) -> SampledTurn: ...
    def forget(self, episode: str) -> None: ...


@dataclass(frozen=True)
class Teacher:
    """A teacher of the run.

    Attributes:
        policy: that its servers serve.
        tokenizer: its own, if its tokens differ from the policy's.
    """

    name: str
    section: TeacherSection
    policy: str
    tokenizer: Tokenizer | None = None


@dataclass(frozen=True)
class TeacherContext:
    """What a teacher reads for one trajectory.

    Attributes:
        token_ids: of the teacher's tokenizer.
        offset: position of the trajectory's first sampled token there, less that in the trajectory.
    """

    token_ids: Sequence[int]
    offset: int


def load_teachers(settings: RunSettings) -> dict[str, Teacher]:
    """Return the teacher of each domain that has one, by domain.

    Raises:
        ConfigError: if a tokenizer cannot be loaded.
    """
    teachers = {name: load_teacher(name, settings) for name in used_teachers(settings)}
    return {
        name: teachers[domain.teacher]
        for name, domain in settings.trained_domains.items()
        if domain.teacher
    }


def used_teachers(settings: RunSettings) -> list[str]:
    """Return the teachers that a trained domain names, sorted."""
    domains = settings.trained_domains.values()
    return sorted({domain.teacher for domain in domains if domain.teacher})


def load_teacher(name: str, settings: RunSettings) -> Teacher:
    """Return a teacher with its tokenizer, if it needs one.

    Raises:
        ConfigError: if the tokenizer cannot be loaded.
    """
    section = settings.teachers[name]
    tokenizer = None
    if section.tokenizer == "aligned":
        tokenizer = Tokenizer.load(
            str(section.model_path),
            trust_remote_code=settings.model.trust_remote_code,
            key=f"teachers.{name}.model_path",
        )
    return Teacher(name, section, section.policy or name, tokenizer)


class TeacherScorer:
    """Scores episodes with the teachers of their domains.

    Args:
        tokenizer: of the policy.
        generator: sends a context to one of the servers of a policy, another one if that fails.
        timeout_s: longest wait for one trajectory.
        max_context_tokens: of the servers.

    Attributes:
        teachers: by domain; the hub replaces them when the run's settings change.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        generator: ContextScorer,
        teachers: Mapping[str, Teacher],
        *,
        timeout_s: float,
        max_context_tokens: int,
        spans: SpanRecorder,
    ) -> None:
        self.teachers = teachers
        self._tokenizer = tokenizer
        self._generator = generator
        self._timeout_s = timeout_s
        self._max_context_tokens = max_context_tokens
        self._spans = spans

    def policy_for(self, domain: str) -> str | None:
        """Return the policy of a domain's teacher, None if it has none."""
        teacher = self.teachers.get(domain)
        return None if teacher is None else teacher.policy

    async def score(self, task: EpisodeTask, result: EpisodeResult) -> None:
        """Add the scores of the domain's teacher to an episode that is trained on.

        Raises:
            EpisodeFailed: if no server of the teacher scores it, or its context is too long there.
        """
        teacher = self.teachers.get(task.domain.name)
        if teacher is None or task.greedy:
            return
        scored = [
            self._score_trajectory(teacher, task, result, index)
            for index in range(len(result.trajectories))
        ]
        span = self._spans.enter("generate")
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(work) for work in scored]
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        finally:
            self._spans.leave("generate", span, task.ticket)
        result.trajectories = [finished.result() for finished in tasks]

    async def _score_trajectory(
        self, teacher: Teacher, task: EpisodeTask, result: EpisodeResult, index: int
    ) -> wire.Trajectory:
        trajectory = result.trajectories[index]
        prompt = result.prompts[index] if result.prompts else None
        translated = None
        if teacher.tokenizer is not None:
            assert prompt is not None
            translated = TranslatedTurn.of(trajectory, prompt, self._tokenizer, teacher.tokenizer)
            opening = self._prompt_ids(teacher, teacher.tokenizer, prompt, result.reference)
            context = TeacherContext([*opening, *translated.text_ids, *translated.end_ids], 0)
        else:
            context = self._context(teacher, trajectory, prompt, result.reference)
        reply = await self._ask(teacher, f"{task.id}.{index}.teacher", context.token_ids)
        assert reply.prompt_logprobs is not None
        values = np.array(reply.prompt_logprobs.array())
        if translated is not None and teacher.tokenizer is not None:
            values = translated.align(values, self._tokenizer, teacher.tokenizer)
        return replace(
            trajectory,
            teacher=make_scores(teacher, trajectory, context.offset, values, reply),
        )

    def _context(
        self,
        teacher: Teacher,
        trajectory: wire.Trajectory,
        prompt: PromptText | None,
        reference: str,
    ) -> TeacherContext:
        """Return the trajectory up to its last sampled token, behind the teacher's own prompt."""
        token_ids = trajectory.token_ids.array()[: trajectory.turns[-1].end].tolist()
        if not teacher.section.hint or prompt is None:
            return TeacherContext(token_ids, 0)
        start = trajectory.turns[0].start
        opening = self._prompt_ids(teacher, self._tokenizer, prompt, reference)
        return TeacherContext([*opening, *token_ids[start:]], len(opening) - start)

    def _prompt_ids(
        self, teacher: Teacher, tokenizer: Tokenizer, prompt: PromptText, reference: str
    ) -> list[int]:
        text = prompt.text
        if teacher.section.hint:
            text = f"{text}\n\n{teacher.section.hint.replace('{reference}', reference)}"
        return list(rules_for(tokenizer, *prompt.opening).start(text))

    async def _ask(
        self, teacher: Teacher, name: str, token_ids: Sequence[int]
    ) -> wire.GenerateReply:
        if len(token_ids) >= self._max_context_tokens:
            most = f"rollout.max_context_tokens is {self._max_context_tokens}"
            raise EpisodeFailed(
                "large", f"teacher {teacher.name} would read {len(token_ids)} tokens, and {most}"
            )
        request = TurnRequest(
            conversation_id=name,
            token_ids=token_ids,
            sampling=wire.SamplingParams(max_tokens=1),
            episode=name,
            policy=teacher.policy,
            timeout_s=self._timeout_s,
            scores_context=True,
            top_k=teacher.section.top_k,
        )
        try:
            turn = await self._generator.turn(request)
        except TurnFailed as error:
            raise EpisodeFailed("generate", f"teacher {teacher.name}: {error}") from error
        finally:
            self._generator.forget(name)
        assert turn.scored is not None
        return turn.scored


def make_scores(
    teacher: Teacher,
    trajectory: wire.Trajectory,
    offset: int,
    logprobs: npt.NDArray[np.float32],
    reply: wire.GenerateReply,
) -> wire.TeacherScores:
    """Return the scores of a trajectory's sampled tokens.

    Args:
        offset: see ``TeacherContext``.
        logprobs: (m - 1,) of each token of the context but the first.
        reply: to the teacher's context.
    """
    mask = trajectory.loss_mask.array()
    # The first token of a context has no logprob, and is never trained on.
    positions = np.flatnonzero(mask[1:]) + 1
    rows = positions + offset - 1
    values = np.zeros(len(mask), np.float32)
    values[positions] = np.minimum(logprobs[rows], 0.0)
    scores = wire.TeacherScores(
        policy=teacher.policy, version=reply.policy_version, logprobs=wire.column(values, "<f4")
    )
    k = teacher.section.top_k
    if not k:
        return scores
    assert reply.top_ids is not None
    assert reply.top_logprobs is not None
    ids = reply.top_ids.array().reshape(-1, k)[rows]
    return replace(
        scores,
        top_ids=wire.column(ids.reshape(-1), "<i4"),
        top_logprobs=wire.column(
            reply.top_logprobs.array().reshape(-1, k)[rows].reshape(-1), "<f4"
        ),
    )
