"""One episode: tokens, masks, rewards, endings, and everything that may go wrong in it."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import envhub_kit
import pytest
from envhub_kit import Scripted, domain, write_tokenizer
from recorded_frames import read_frames
from source_lines import line_of

from broker.contract import checks
from envhub.domain import Domain
from envhub.envs.base import Environment
from envhub.episodes.runners import EpisodeLimits, EpisodeRunners
from envhub.servers.turn import mix
from envhub.task import EpisodeFailed, EpisodeResult, EpisodeTask
from envhub.workers.calls import CallFailed, EnvironmentCalls
from rlearner_text.tokenizer import Tokenizer

TROUBLE = line_of("envhub_kit.py", "raise ValueError(")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def players(
    tokenizer: Tokenizer,
    script: Callable[[str], str] = lambda _: "R",
    *,
    step_s: float = 5.0,
    episode_s: float = 20.0,
) -> EpisodeRunners:
    return EpisodeRunners(
        tokenizer,
        Scripted(tokenizer, script),
        EnvironmentCalls(step_s),
        EpisodeLimits(episode_s, 10.0),
    )


def task(chosen: Domain, *, record: bool = False, episode: int = 0) -> EpisodeTask:
    return EpisodeTask(
        "c", chosen, task_index=0, split="eval", seed=77, episode=episode, record=record
    )


async def play(crew: EpisodeRunners, chosen: Domain, **kwargs: object) -> EpisodeResult:
    return await crew.play(task(chosen, **kwargs), lambda _: None)  # type: ignore[arg-type]


def count(**env_args: object) -> Domain:
    return domain("envhub_kit:Count", max_turns=5, env_args=env_args)


@pytest.mark.parametrize("context", ["full", "steps"])
async def test_examples_come_first_and_are_not_trained_on(
    context: str, tokenizer: Tokenizer
) -> None:
    examples = [{"question": "up", "answer": "U"}, {"question": "<|im_end|>", "answer": "D"}]
    settings: dict[str, Any] = {"system_prompt": "go", "examples": examples, "context": context}
    lake = domain("frozenlake", max_turns=2, sampling={"max_tokens": 4}, **settings)
    crew = players(tokenizer, lambda context: "R")
    played = await crew.play(task(lake), lambda _: None)
    for trajectory in played.trajectories:
        ids, mask = trajectory.token_ids.array().tolist(), trajectory.loss_mask.array().tolist()
        text = tokenizer.decode(ids, skip_special_tokens=False)
        assert text.startswith(
            "<|im_system|>go<|im_end|>"
            "<|im_user|>up<|im_end|><|im_assistant|>U<|im_end|>"
            "<|im_user|><|im_end|><|im_end|><|im_assistant|>D<|im_end|>"
            "<|im_user|>"
        )
        sampled = [token for token, trained in zip(ids, mask, strict=True) if trained]
        answers = tokenizer.decode(sampled, skip_special_tokens=False)
        assert set(answers.split("<|im_end|>")) == {"R", ""}
        # what a question spells out is no special token
        assert ids.count(tokenizer.encode("<|im_end|>")[0]) == text.count("<|im_end|>") - 1


async def test_the_whole_conversation_token_by_token(tokenizer: Tokenizer) -> None:
    lake = domain("frozenlake", max_turns=3, sampling={"max_tokens": 4}, system_prompt="go")
    crew = players(tokenizer, lambda context: "R" if context.count("assistant") < 3 else "no")
    seen: list[int] = []
    played = await crew.play(task(lake), seen.append)
    trajectory = played.trajectory
    checks.check_trajectory(trajectory)
    ids, mask = trajectory.token_ids.array().tolist(), trajectory.loss_mask.array().tolist()
    assert tokenizer.decode(ids, skip_special_tokens=False) == (
        "<|im_system|>go<|im_end|>"
        "<|im_user|>PFFF\nFFFH\nFFFF\nFFFG<|im_end|><|im_assistant|>R<|im_end|>"
        "<|im_user|>SPFF\nFFFH\nFFFF\nFFFG<|im_end|><|im_assistant|>R<|im_end|>"
        "<|im_user|>SFPF\nFFFH\nFFFF\nFFFG<|im_end|><|im_assistant|>no<|im_end|>"
    )
    sampled = [token for token, one in zip(ids, mask, strict=True) if one]
    assert (
        tokenizer.decode(sampled, skip_special_tokens=False) == "R<|im_end|>R<|im_end|>no<|im_end|>"
    )
    assert trajectory.logprobs.array().tolist() == [-0.5 * one for one in mask]
    assert trajectory.version_runs.array().tolist() == [3, 7]
    assert seen == [3, 3, 3]
    assert [
        (turn.end - turn.start, turn.valid, turn.finish_reason) for turn in trajectory.turns
    ] == [
        (2, True, "stop"),
        (2, True, "stop"),
        (3, False, "stop"),
    ]
    assert [turn.anchor[:4] for turn in trajectory.turns] == ["PFFF", "SPFF", "SFPF"]
    assert (trajectory.end, trajectory.reward, trajectory.success, trajectory.response) == (
        "truncated",
        0.0,
        False,
        "no",
    )
    assert trajectory.metrics == {"valid_action_rate": pytest.approx(2 / 3), "num_turns": 3.0}
    assert trajectory.reward_parts == {"env": 0.0}


async def test_what_is_shown_is_the_anchor_of_a_state_without_one(tokenizer: Tokenizer) -> None:
    """As with gigpo: an environment's own anchors stay; equal tasks begin in equal states, also
    where the first observation is empty.
    """
    for env, expected in (
        ("envhub_kit:Silent", ["seven", "text 1", ""]),
        ("envhub_kit:Count", ["0", "1"]),
    ):
        chosen = domain(env, max_turns=3, anchors="observation")
        trajectory = (await play(players(tokenizer), chosen)).trajectory
        assert [turn.anchor for turn in trajectory.turns] == expected
    plain = (await play(players(tokenizer), domain("envhub_kit:Silent", max_turns=3))).trajectory
    assert [turn.anchor for turn in plain.turns] == ["", "", ""]


async def test_an_observation_costs_the_small_model_few_tokens(tokenizer: Tokenizer) -> None:
    lake = domain("frozenlake", max_turns=4)
    trajectory = (await play(players(tokenizer), lake)).trajectory
    starts = [turn.start for turn in trajectory.turns]
    assert starts[0] == 22
    assert starts[1] - starts[0] == 24  # one move and the next observation, all markup included
    brief = domain("frozenlake", max_turns=4, env_args={"observe": "cell"})
    trajectory = (await play(players(tokenizer), brief)).trajectory
    starts = [turn.start for turn in trajectory.turns]
    assert starts[1] - starts[0] <= 16


async def test_the_goal_ends_it(tokenizer: Tokenizer) -> None:
    moves = iter("RRDDDR")
    lake = domain("frozenlake", max_turns=9)
    played = await play(players(tokenizer, lambda _: next(moves)), lake, record=True)
    trajectory = played.trajectory
    assert (trajectory.end, trajectory.reward, trajectory.success) == ("terminated", 1.0, True)
    assert [turn.reward for turn in trajectory.turns] == [0, 0, 0, 0, 0, 1]
    recorded = read_frames(played.frames)
    assert (recorded.task_index, recorded.split, recorded.seed, recorded.actions) == (
        0,
        "eval",
        77,
        list("RRDDDR"),
    )
    assert json.loads(played.frames[-1]) == {"action": "R", "text": "SFFF\nFFFH\nFFFF\nFFF*"}


async def test_each_turn_is_seeded_and_sampled_as_the_domain_says(tokenizer: Tokenizer) -> None:
    lake = domain(
        "frozenlake",
        max_turns=2,
        max_context_tokens=50,
        sampling={"temperature": 0.7, "top_p": 0.9, "max_tokens": 5, "stop": ["x"]},
    )
    crew = players(tokenizer)
    await play(crew, lake)
    await play(crew, lake, episode=1)
    asks = crew.turns.asks  # type: ignore[attr-defined]
    first = asks[0].sampling
    assert (first.temperature, first.top_p, first.max_tokens, first.stop) == (0.7, 0.9, 5, ["x"])
    assert tokenizer.token_id("<|im_end|>") in first.stop_token_ids
    assert first.seed == mix(77, 0, 22)
    assert len({ask.sampling.seed for ask in asks}) == 4
    assert asks[1].sampling.max_tokens == 4  # the context holds 46 tokens by then
    assert (asks[0].sticky, asks[1].sticky) == ("", "server-1")
    assert (asks[0].expected_tokens, asks[1].expected_tokens) == (0, 2)


async def test_a_full_context_ends_it(tokenizer: Tokenizer) -> None:
    lake = domain("frozenlake", max_turns=9, max_context_tokens=48)
    trajectory = (await play(players(tokenizer), lake)).trajectory
    assert (trajectory.end, len(trajectory.turns)) == ("length", 2)
    assert len(trajectory.token_ids.array()) == 48


async def test_a_turn_that_was_cut_off_is_closed_unmasked(tokenizer: Tokenizer) -> None:
    lake = domain("frozenlake", max_turns=2, sampling={"max_tokens": 2})
    crew = players(tokenizer, lambda _: "RRRR")
    trajectory = (await play(crew, lake)).trajectory
    assert [turn.finish_reason for turn in trajectory.turns] == ["length", "length"]
    assert "RR<|im_end|><|im_user|>" in tokenizer.decode(
        trajectory.token_ids.array().tolist(), skip_special_tokens=False
    )
    assert sum(trajectory.loss_mask.array()) == 4


async def test_a_prompt_without_room_for_an_answer_is_fatal(tokenizer: Tokenizer) -> None:
    lake = domain("frozenlake", max_context_tokens=22)
    with pytest.raises(
        EpisodeFailed, match="the prompt has 22 tokens and max_context_tokens is 22"
    ) as caught:
        await play(players(tokenizer), lake)
    assert caught.value.kind == "fatal"


async def test_questions_carry_prompt_and_reference(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "q.jsonl").write_text('{"question": "1+1", "answer": "#### 2"}\n')
    qa = domain(
        "qa",
        env_args={"path": str(tmp_path / "q.jsonl"), "eval_share": 0},
        rewards=[{"name": "math"}],
    )
    chosen = EpisodeTask("c", qa, task_index=0, split="train", seed=1, episode=0)
    played = await players(tokenizer, lambda _: "two").play(chosen, lambda _: None)
    assert (played.prompt, played.reference, played.trajectory.response) == ("1+1", "#### 2", "two")
    assert (played.trajectory.reward_parts, played.trajectory.end) == ({}, "terminated")


@pytest.mark.parametrize("env", ["envhub_kit:Count", "envhub_kit:AsyncCount"])
async def test_environments_of_either_kind_are_used_again(tokenizer: Tokenizer, env: str) -> None:
    envhub_kit.Count.made = envhub_kit.AsyncCount.made = 0
    crew, chosen = players(tokenizer), domain(env, max_turns=5)
    for _ in range(3):
        played = await play(crew, chosen)
        assert (
            played.trajectory.reward,
            played.trajectory.success,
            played.trajectory.metrics["at"],
        ) == (
            1.0,
            True,
            2.0,
        )
        assert played.env_step_s > 0
    assert envhub_kit.Count.made + envhub_kit.AsyncCount.made == 1
    await crew.close()


@pytest.mark.parametrize(
    ("trouble", "detail"),
    [
        (
            "raise in reset",
            f"reset raised ValueError: broken in reset (envhub_kit.py:{TROUBLE} in _trouble)",
        ),
        (
            "raise in step",
            f"step raised ValueError: broken in step (envhub_kit.py:{TROUBLE} in _trouble)",
        ),
        ("nan", "step returned reward nan; it must be finite"),
    ],
)
async def test_a_broken_environment_fails_its_episode_and_is_not_used_again(
    tokenizer: Tokenizer, trouble: str, detail: str
) -> None:
    crew, chosen = players(tokenizer), count(trouble=trouble)
    closed = envhub_kit.Count.closed
    with pytest.raises(EpisodeFailed) as caught:
        await play(crew, chosen)
    assert (caught.value.kind, caught.value.detail) == ("env", detail)
    assert not crew.idle.get("d")
    async with asyncio.timeout(60):
        while envhub_kit.Count.closed == closed:  # noqa: ASYNC110 - a counter has no event
            await asyncio.sleep(0.01)


async def test_a_hanging_environment_costs_a_thread_and_not_the_loop(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = threading.Event()
    monkeypatch.setattr(envhub_kit.Count, "released", released)
    crew, chosen = players(tokenizer, step_s=1.0), count(trouble="hang in step", seconds=60.0)
    good = asyncio.create_task(play(crew, count()))
    with pytest.raises(EpisodeFailed) as caught:
        await play(crew, chosen)
    assert caught.value.detail == "step did not return within 1 s"
    assert (await good).trajectory.success
    assert crew.calls.hung == 1
    released.set()
    async with asyncio.timeout(60):
        while crew.calls.hung:  # noqa: ASYNC110 - a counter has no event
            await asyncio.sleep(0.02)
    await crew.close()


async def test_an_asynchronous_environment_is_timed_out(tokenizer: Tokenizer) -> None:
    chosen = domain(
        "envhub_kit:AsyncCount", max_turns=5, env_args={"trouble": "await in step", "seconds": 600}
    )
    with pytest.raises(EpisodeFailed, match=r"step did not return within 0\.5 s"):
        await play(players(tokenizer, step_s=0.5), chosen)


async def test_an_episode_has_a_time_limit(tokenizer: Tokenizer) -> None:
    crew = players(tokenizer, episode_s=0.2)
    with pytest.raises(EpisodeFailed, match=r"the episode took longer than 0\.2 s") as caught:
        await play(crew, count(trouble="hang in step", seconds=0.5))
    assert caught.value.kind == "timeout"


async def test_whatever_an_environment_raises_is_caught() -> None:
    raises = {
        "exit": (SystemExit(3), "SystemExit: 3"),
        "stop": (StopIteration(), "StopIteration"),
        "late": (TimeoutError("mine"), "TimeoutError: mine"),
        "interrupt": (KeyboardInterrupt("me"), "KeyboardInterrupt: me"),
        "cancel": (asyncio.CancelledError("me"), "CancelledError: me"),
    }

    class Quits(Environment):
        def step(self, text: str) -> None:  # type: ignore[override]
            raise raises[text][0]

        async def reset(self, text: str) -> None:  # type: ignore[override]
            raise raises[text][0]

    calls, before = EnvironmentCalls(1.0), threading.active_count()
    for isolation in ("thread", "none"):
        quits = Quits(None)
        quits.isolation = isolation
        for text, (_, said) in raises.items():
            with pytest.raises(CallFailed, match=said):
                await calls.call(quits, "step", text)
            if text != "stop":  # which a coroutine cannot raise
                with pytest.raises(CallFailed, match=said):
                    await calls.call(quits, "reset", text)
    assert threading.active_count() == before + 1
    calls.close()
