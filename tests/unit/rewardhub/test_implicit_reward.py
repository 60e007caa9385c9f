"""The reward ``implicit_reward``: log-ratios of tokens as transformers gives them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from process_models import make_sample, write_language_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from broker.errors import ConfigError
from rewardhub.rewards.base import NoScore, Sample
from rewardhub.rewards.models.implicit_reward import ImplicitReward
from rewardhub.rewards.models.process_args import ImplicitRewardArgs
from rlearner_text.config import TinyModel
from rlearner_text.tiny import build_tiny

BETA = 0.5
SAMPLE = make_sample("four", "yes")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The trained model and its reference."""
    place = tmp_path_factory.mktemp("implicit")
    return write_language_model(place / "model"), write_language_model(place / "reference", seed=7)


def make_reward(folders: tuple[Path, Path], **args: Any) -> ImplicitReward:
    model, reference = map(str, folders)
    return ImplicitReward(ImplicitRewardArgs(path=model, reference=reference, beta=BETA, **args))


def expected_rewards(folders: tuple[Path, Path], sample: Sample) -> list[list[float]]:
    """Return the rewards of the tokens of each turn, its end included."""
    tokenizer = AutoTokenizer.from_pretrained(folders[0])
    ids = tokenizer.apply_chat_template(sample.messages, return_tensors="pt", return_dict=True)[
        "input_ids"
    ]
    ratios = torch.zeros(ids.shape[1])
    for sign, folder in ((1, folders[0]), (-1, folders[1])):
        logits = AutoModelForCausalLM.from_pretrained(folder)(ids[:, :-1]).logits[0]
        logprobs = logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
        ratios[1:] += sign * logprobs.detach()
    begin = tokenizer.convert_tokens_to_ids("<|im_assistant|>")
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    turns = []
    for start in (ids[0] == begin).nonzero()[:, 0].tolist():
        stop = next(at for at in range(start, ids.shape[1]) if ids[0, at] == end)
        turns.append((BETA * ratios[start + 1 : stop + 1]).tolist())
    return turns


async def test_tokens_and_turns_are_those_of_transformers(folders: tuple[Path, Path]) -> None:
    expected = expected_rewards(folders, SAMPLE)
    assert [len(turn) for turn in expected] == [5, 4]
    reward = make_reward(folders)
    for turn, wanted in zip(await reward.token_rewards(SAMPLE), expected, strict=True):
        assert turn == pytest.approx(wanted, abs=1e-5)
    scored = await reward.score(SAMPLE)
    assert scored.value == pytest.approx([math.fsum(turn) for turn in expected], abs=1e-5)
    assert scored.notes == {"tokens": 9.0, "truncated": 0.0}
    episode = await make_reward(folders, credit="episode", aggregate="mean").score(SAMPLE)
    assert episode.value == pytest.approx(math.fsum(expected[0] + expected[1]) / 9, abs=1e-5)


async def test_a_model_that_is_its_reference_rewards_nothing(folders: tuple[Path, Path]) -> None:
    scored = await make_reward((folders[0], folders[0])).score(SAMPLE)
    assert scored.value == [0.0, 0.0]


async def test_tokens_beyond_the_limit_count_nothing(folders: tuple[Path, Path]) -> None:
    (first, _) = expected_rewards(folders, SAMPLE)
    # Nine tokens up to the first turn, and two of it.
    scored = await make_reward(folders, max_length=11).score(SAMPLE)
    assert scored.value == pytest.approx([math.fsum(first[:2]), 0.0], abs=1e-5)
    assert scored.notes == {"tokens": 2.0, "truncated": 1.0}


async def test_special_tokens_in_an_answer_are_plain_text(folders: tuple[Path, Path]) -> None:
    reward = make_reward(folders)
    (turn,) = await reward.token_rewards(make_sample("a<|im_end|>"))
    # Each character is a token, and the end of the turn one more.
    assert len(turn) == len("a<|im_end|>") + 1


async def test_a_conversation_that_dpo_would_refuse_has_no_score(
    folders: tuple[Path, Path],
) -> None:
    messages = [{"role": "user", "content": "a"}, *SAMPLE.messages]
    shifted = [replace(turn, message=turn.message + 1) for turn in SAMPLE.turns]
    sample = replace(SAMPLE, messages=messages, turns=shifted)
    with pytest.raises(NoScore, match="task 1: message 1 has role 'user', expected 'assistant'"):
        await make_reward(folders).score(sample)


def test_another_vocabulary_is_refused(folders: tuple[Path, Path], tmp_path: Path) -> None:
    other = build_tiny(
        tmp_path / "other",
        TinyModel(
            hidden_size=16, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=16,
            intermediate_size=16, words=["up", "down"],
        ),
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"args\.reference: .* a model with the vocabulary of"):
        make_reward((folders[0], other))
