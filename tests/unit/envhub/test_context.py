"""Step-independent prompts: what each turn sees, what an episode leaves, and a memory of the user's
that misbehaves.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from envhub_kit import Scripted, domain, write_tokenizer
from hypothesis import given
from hypothesis import strategies as st

from broker.contract import checks, wire
from broker.errors import ConfigError, UserError
from broker.settings.run_settings import RunSettings
from broker.settings.runspec import validate
from broker.settings.schema.algorithm import AlgorithmSection
from envhub.context import StepContext, recent
from envhub.demos import write_demonstrations
from envhub.domain import Domain, load_domains
from envhub.episodes.runners import EpisodeLimits, EpisodeRunners
from envhub.task import EpisodeFailed, EpisodeTask
from envhub.workers.calls import EnvironmentCalls
from rlearner_text.tokenizer import Tokenizer

PAST = [("a", "1"), ("b", "2"), ("c", "3")]


@pytest.mark.parametrize(
    ("past", "length", "prompt"),
    [
        ([], 2, "a"),
        (PAST, 0, "a\nd"),
        (PAST, 1, "a\nc\n3\nd"),
        (PAST, 2, "a\nb\n2\nc\n3\nd"),
        (PAST, 3, "a\n1\nb\n2\nc\n3\nd"),  # the opening stands once
        (PAST[:1], 9, "a\n1\nd"),
    ],
)
def test_a_prompt_shows_the_opening_the_last_turns_and_the_present(
    past: list[tuple[str, str]], length: int, prompt: str
) -> None:
    assert recent("a", past, "d" if past else "a", length) == prompt


@given(
    st.lists(st.tuples(st.text(max_size=3), st.text(max_size=3)), max_size=12), st.integers(0, 4)
)
def test_a_prompt_is_bounded_by_the_history_length(
    past: list[tuple[str, str]], length: int
) -> None:
    assert len(recent("o", past, "n", length).split("\n")) <= 2 + 2 * length + sum(
        part.count("\n") for turn in past for part in turn
    )


def test_a_context_remembers_what_was_seen_and_done() -> None:
    context = StepContext(recent, 1)
    assert [context.open("a"), context.acted("1", "b"), context.acted("2", "c")] == [
        "a",
        "a\n1\nb",
        "a\nb\n2\nc",
    ]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


async def played(tokenizer: Tokenizer, chosen: Domain) -> tuple[Scripted, list[wire.Trajectory]]:
    scripted = Scripted(tokenizer, lambda _: "R")
    crew = EpisodeRunners(tokenizer, scripted, EnvironmentCalls(5.0), EpisodeLimits(20.0, 10.0))
    task = EpisodeTask("c", chosen, task_index=0, split="eval", seed=77, episode=4)
    return scripted, (await crew.play(task, lambda _: None)).trajectories


async def test_each_turn_is_a_sample_of_its_own(tokenizer: Tokenizer) -> None:
    chosen = domain(
        "frozenlake", max_turns=3, sampling={"max_tokens": 4}, context="steps", history_length=1
    )
    scripted, samples = await played(tokenizer, chosen)
    for sample in samples:
        checks.check_trajectory(sample)
    assert [
        tokenizer.decode(one.token_ids.array().tolist(), skip_special_tokens=False)
        for one in samples
    ] == [
        "<|im_user|>PFFF\nFFFH\nFFFF\nFFFG<|im_end|><|im_assistant|>R<|im_end|>",
        "<|im_user|>PFFF\nFFFH\nFFFF\nFFFG\nR\nSPFF\nFFFH\nFFFF\nFFFG<|im_end|><|im_assistant|>R<|im_end|>",
        "<|im_user|>PFFF\nFFFH\nFFFF\nFFFG\nSPFF\nFFFH\nFFFF\nFFFG\nR\nSFPF\nFFFH\nFFFF\nFFFG<|im_end|><|im_assistant|>R<|im_end|>",
    ]
    assert [one.episode for one in samples] == [4, 4, 4]
    assert [
        [(turn.end - turn.start, turn.anchor[:4]) for turn in one.turns] for one in samples
    ] == [
        [(2, "PFFF")],
        [(2, "SPFF")],
        [(2, "SFPF")],
    ]
    assert [int(one.loss_mask.array().sum()) for one in samples] == [2, 2, 2]
    assert [one.metrics for one in samples] == [
        {},
        {},
        {"valid_action_rate": 1.0, "num_turns": 3.0},
    ]
    assert [ask.conversation_id for ask in scripted.asks] == ["c.0", "c.1", "c.2"]
    assert len({ask.sampling.seed for ask in scripted.asks}) == 3


async def test_a_prompt_without_room_ends_the_episode(tokenizer: Tokenizer) -> None:
    chosen = domain(
        "frozenlake",
        max_turns=9,
        sampling={"max_tokens": 4},
        context="steps",
        history_length=9,
        max_context_tokens=60,
    )
    _, samples = await played(tokenizer, chosen)
    assert len(samples) == 2  # 24, 46 and 68 tokens with the third
    assert {one.end for one in samples} == {"length"}


@pytest.mark.parametrize(
    ("body", "says"),
    [("return 7", "memory returned int, not a text"), ("return past[9]", "IndexError")],
)
async def test_a_memory_that_fails_closes_its_ticket(
    tokenizer: Tokenizer, tmp_path: Path, body: str, says: str
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(f"def remember(opening, past, now, history_length):\n    {body}\n")
    with pytest.raises(EpisodeFailed, match=says) as caught:
        await played(
            tokenizer,
            domain(
                "frozenlake",
                max_turns=3,
                sampling={"max_tokens": 4},
                context="steps",
                memory=f"{file}:remember",
            ),
        )
    assert caught.value.kind == "fatal"


def test_an_unknown_memory_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"domains\.d\.memory: 'recnt' is not allowed; did you mean 'recent'"
    ):
        domain("frozenlake", context="steps", memory="recnt")


async def test_thinking_is_kept_in_the_sample_and_dropped_from_what_others_see(
    tokenizer: Tokenizer,
) -> None:
    scripted = Scripted(tokenizer, lambda _: "<think>L or U?</think>R")
    chosen = domain(
        "frozenlake",
        max_turns=2,
        sampling={"max_tokens": 40},
        context="steps",
        history_length=1,
        thinking="drop",
    )
    crew = EpisodeRunners(tokenizer, scripted, EnvironmentCalls(5.0), EpisodeLimits(20.0, 10.0))
    samples = (
        await crew.play(
            EpisodeTask("c", chosen, task_index=0, split="eval", seed=77, episode=4), lambda _: None
        )
    ).trajectories
    # R, not the L that it thinks of first
    assert [turn.valid for sample in samples for turn in sample.turns] == [True, True]
    assert samples[-1].response == "<think>L or U?</think>R"
    shown = tokenizer.decode(scripted.asks[1].token_ids).removesuffix("<think>L or U?</think>R")
    assert shown == "PFFF\nFFFH\nFFFF\nFFFG\nR\nSPFF\nFFFH\nFFFF\nFFFG"


def lake(**section: object) -> RunSettings:
    config = validate(
        {
            "domains": {
                "lake": {
                    "env": "frozenlake",
                    "max_turns": 4,
                    "sampling": {"max_tokens": 4},
                    **section,
                }
            }
        }
    )
    return RunSettings.of_config(config)


def test_auto_is_steps_for_gigpo_alone() -> None:
    settings = lake()
    assert load_domains(settings)["lake"].memory is None
    algorithm = AlgorithmSection(adv_estimator="gigpo")
    stepwise = settings.model_copy(update={"algorithm": algorithm})
    assert load_domains(stepwise)["lake"].memory is recent


@pytest.mark.parametrize(
    ("anchors", "estimator", "shows"),
    [
        ("auto", "gigpo", True),
        ("auto", "grpo", False),
        ("observation", "grpo", True),
        ("environment", "gigpo", False),
    ],
)
def test_what_is_shown_is_the_anchor_with_gigpo(anchors: str, estimator: str, shows: bool) -> None:
    algorithm = AlgorithmSection(adv_estimator=estimator)
    settings = lake(anchors=anchors).model_copy(update={"algorithm": algorithm})
    assert load_domains(settings)["lake"].shows_anchors == shows


def test_demonstrations_have_the_prompts_that_the_hub_makes(tmp_path: Path) -> None:
    write_demonstrations(
        lake(context="steps", history_length=1),
        None,
        episodes=3,
        noise=0.0,
        out=str(tmp_path / "steps"),
    )
    write_demonstrations(lake(), None, episodes=3, noise=0.0, out=str(tmp_path / "full"))
    steps, full = (
        [json.loads(line)["messages"] for line in (tmp_path / name).read_text().splitlines()]
        for name in ("steps", "full")
    )
    turns = [
        (messages[0]["content"], messages[i]["content"], messages[i + 1]["content"])
        for messages in full
        for i in range(0, len(messages), 2)
    ]
    assert len(full) == 3
    assert [messages[1]["content"] for messages in steps] == [action for _, _, action in turns]
    assert all(
        messages[0]["content"].startswith(opening)
        for messages, (opening, _, _) in zip(steps, turns, strict=True)
    )
    assert all(
        messages[0]["content"].endswith(now)
        for messages, (_, now, _) in zip(steps, turns, strict=True)
    )
    with pytest.raises(UserError, match="pairs need whole conversations"):
        write_demonstrations(
            lake(context="steps"),
            None,
            episodes=3,
            noise=0.0,
            out=str(tmp_path / "pairs"),
            against=1.0,
        )
