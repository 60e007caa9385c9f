"""Teachers read what they should, and their scores stand at the tokens that they are of."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from envhub_kit import Count, Scripted, domain, write_tokenizer

from broker.contract import checks, wire
from broker.runtime.spans import SpanRecorder
from broker.settings.schema.teaching import TeacherSection
from envhub.episodes.runners import EpisodeLimits, EpisodeRunners
from envhub.episodes.teachers import Teacher, TeacherScorer
from envhub.servers.turn import SampledTurn, TurnFailed, TurnRequest, scores_problem
from envhub.task import EpisodeFailed, EpisodeResult, EpisodeTask
from envhub.workers.calls import EnvironmentCalls
from rlearner_text.tokenizer import Tokenizer


class Servers:
    """Answers with -0.001 times the id of each token, and candidates in ascending order."""

    def __init__(self, problem: str = "") -> None:
        self.asks: list[TurnRequest] = []
        self.forgotten: list[str] = []
        self.problem = problem

    async def turn(self, ask: TurnRequest) -> SampledTurn:
        self.asks.append(ask)
        if self.problem:
            raise TurnFailed(self.problem)
        return SampledTurn(scored=reply_to(ask, len(ask.token_ids) - 1))

    def forget(self, episode: str) -> None:
        self.forgotten.append(episode)


def reply_to(ask: TurnRequest, count: int) -> wire.GenerateReply:
    ids = np.array(ask.token_ids[1:], np.float32)[:count]
    k = ask.top_k
    top = np.tile(np.arange(k), count)
    return wire.GenerateReply(
        request_id="a",
        server="teacher-1",
        token_ids=wire.column([], "<i4"),
        logprobs=wire.column([], "<f4"),
        version_runs=wire.column([], "<i4"),
        finish_reason="stop",
        policy_version=5,
        prompt_logprobs=wire.column(-0.001 * ids, "<f4"),
        top_ids=wire.column(top, "<i4") if k else None,
        top_logprobs=wire.column(-1.0 - top, "<f4") if k else None,
    )


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return Tokenizer.load(write_tokenizer(tmp_path))


async def play(tokenizer: Tokenizer, **section: object) -> tuple[EpisodeTask, EpisodeResult]:
    count = domain(f"{Count.__module__}:Count", max_turns=2, max_context_tokens=256, **section)
    task = EpisodeTask("hub.7.0.0", count, 3, split="train", seed=1, episode=0, ticket=7)
    policy = Scripted(tokenizer, lambda context: "ab")
    runners = EpisodeRunners(tokenizer, policy, EnvironmentCalls(30.0), EpisodeLimits(60.0, 60.0))
    try:
        return task, await runners.play(task, lambda version: None)
    finally:
        await runners.close()


def scorer(
    tokenizer: Tokenizer, servers: Servers, most: int = 4096, **section: object
) -> TeacherScorer:
    teacher = Teacher("big", TeacherSection.model_validate(section), "big")
    return TeacherScorer(
        tokenizer,
        servers,
        {"d": teacher},
        timeout_s=10.0,
        max_context_tokens=most,
        spans=SpanRecorder(),
    )


async def test_sampled_tokens_get_their_logprobs(tokenizer: Tokenizer) -> None:
    task, result = await play(tokenizer)
    servers = Servers()
    await scorer(tokenizer, servers, top_k=3).score(task, result)
    (ask,) = servers.asks
    assert (ask.policy, ask.scores_context, ask.top_k) == ("big", True, 3)
    assert servers.forgotten == [ask.episode]
    (trajectory,) = result.trajectories
    checks.check_trajectory(trajectory)
    ids, mask = trajectory.token_ids.array(), trajectory.loss_mask.array()
    teacher = trajectory.teacher
    assert teacher is not None
    assert (teacher.policy, teacher.version) == ("big", 5)
    np.testing.assert_allclose(teacher.logprobs.array(), -0.001 * ids * mask, rtol=1e-6)
    assert teacher.top_ids is not None
    assert teacher.top_ids.array().tolist() == [0, 1, 2] * int(mask.sum())


async def test_a_hint_stands_in_the_teachers_prompt_alone(tokenizer: Tokenizer) -> None:
    task, result = await play(tokenizer)
    result.reference = "42"
    servers = Servers()
    await scorer(tokenizer, servers, hint="answer {reference}").score(task, result)
    (trajectory,) = result.trajectories
    ids, mask = trajectory.token_ids.array(), trajectory.loss_mask.array()
    start = trajectory.turns[0].start
    read = list(servers.asks[0].token_ids)
    sampled_and_later = ids[start : trajectory.turns[-1].end].tolist()
    assert read[-len(sampled_and_later) :] == sampled_and_later
    assert tokenizer.decode(read).count("answer 42") == 1
    assert "answer" not in tokenizer.decode(ids.tolist())
    assert trajectory.teacher is not None
    np.testing.assert_allclose(trajectory.teacher.logprobs.array(), -0.001 * ids * mask, rtol=1e-6)


async def test_each_turn_of_an_episode_in_steps_is_scored(tokenizer: Tokenizer) -> None:
    task, result = await play(tokenizer, context="steps")
    task = EpisodeTask(
        task.id, task.domain, task.task_index, split="train", seed=1, episode=0, ticket=7
    )
    servers = Servers()
    await scorer(tokenizer, servers, hint="think").score(task, result)
    assert len(result.trajectories) == len(servers.asks) == 2
    assert len({ask.episode for ask in servers.asks}) == 2
    assert all(trajectory.teacher is not None for trajectory in result.trajectories)


async def test_greedy_baselines_and_domains_without_a_teacher_are_left_alone(
    tokenizer: Tokenizer,
) -> None:
    task, result = await play(tokenizer)
    servers = Servers()
    teachers = scorer(tokenizer, servers)
    greedy = EpisodeTask(
        task.id, task.domain, 3, split="train", seed=1, episode=0, ticket=7, greedy=True
    )
    await teachers.score(greedy, result)
    teachers.teachers = {}
    await teachers.score(task, result)
    assert servers.asks == []
    assert teachers.policy_for("d") is None


async def test_a_teacher_that_fails_fails_the_attempt(tokenizer: Tokenizer) -> None:
    task, result = await play(tokenizer)
    with pytest.raises(EpisodeFailed, match="teacher big: no server") as failure:
        await scorer(tokenizer, Servers("no server")).score(task, result)
    # handed back, see envhub/scheduling/slots.py
    assert failure.value.kind == "generate"
    with pytest.raises(EpisodeFailed, match=r"would read \d+ tokens, and .* is 8") as failure:
        await scorer(tokenizer, Servers(), most=8).score(task, result)
    assert failure.value.kind == "large"


async def test_aligned_scores_are_spread_over_the_policys_tokens(tokenizer: Tokenizer) -> None:
    task, result = await play(tokenizer)
    (whole,) = result.trajectories
    first = whole.turns[0]
    trajectory = wire.Trajectory(
        **{
            name: getattr(whole, name)
            for name in ("episode", "reward", "reward_parts", "success", "end")
        },
        token_ids=wire.column(whole.token_ids.array()[: first.end], "<i4"),
        loss_mask=wire.column(whole.loss_mask.array()[: first.end], "|u1"),
        logprobs=wire.column(whole.logprobs.array()[: first.end], "<f4"),
        version_runs=wire.column([3, first.end - first.start], "<i4"),
        turns=[first],
    )
    result.trajectories = [trajectory]
    servers = Servers()
    teachers = scorer(tokenizer, servers)
    teachers.teachers = {"d": Teacher("big", TeacherSection(tokenizer="aligned"), "big", tokenizer)}
    await teachers.score(task, result)
    # With the same tokenizer, the same values as without alignment.
    ids, mask = trajectory.token_ids.array(), trajectory.loss_mask.array()
    (aligned,) = result.trajectories
    assert aligned.teacher is not None
    np.testing.assert_allclose(aligned.teacher.logprobs.array(), -0.001 * ids * mask, rtol=1e-5)


def test_a_reply_with_too_few_scores_is_refused() -> None:
    ask = TurnRequest("c", [1, 2, 3], wire.SamplingParams(max_tokens=1), scores_context=True)
    assert scores_problem(ask, reply_to(ask, 2)) == ""
    assert scores_problem(ask, reply_to(ask, 1)) == (
        "returned 1 logprobs of the context, expected 2"
    )
    wanted = TurnRequest(
        "c", [1, 2, 3], wire.SamplingParams(max_tokens=1), scores_context=True, top_k=2
    )
    assert scores_problem(wanted, reply_to(ask, 2)) == (
        "returned 0 likeliest tokens of the context, expected 4"
    )
