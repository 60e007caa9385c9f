"""Episodes of models that reason: what is sampled stays, environments see the answer."""

from __future__ import annotations

from pathlib import Path

import pytest
from envhub_kit import domain
from model_templates import STYLES, make_style_folder

from broker.contract import checks
from envhub.episodes.runners import EpisodeLimits, EpisodeRunners
from envhub.servers.turn import SampledTurn, TurnRequest
from envhub.task import EpisodeTask
from envhub.workers.calls import EnvironmentCalls
from rlearner_text.tokenizer import Tokenizer

ANALYSIS = "<|channel|>analysis<|message|>L or U?<|end|><|start|>assistant<|channel|>final<|message|>R<|return|>"


class ScriptedTokens:
    """Samples the same turn each time, whose end token is part of the text."""

    def __init__(self, tokenizer: Tokenizer, turn: str) -> None:
        self.tokenizer, self.ids = tokenizer, tokenizer.encode(turn)
        self.asks: list[TurnRequest] = []

    async def turn(self, ask: TurnRequest) -> SampledTurn:
        self.asks.append(ask)
        assert self.ids[-1] in ask.sampling.stop_token_ids
        return SampledTurn.of(
            self.ids, [-0.5] * len(self.ids), [3, len(self.ids)], "stop", "server-1"
        )

    def forget(self, episode: str) -> None: ...


@pytest.mark.parametrize(
    ("name", "turn", "response", "second"),
    [
        (
            "harmony",
            ANALYSIS,
            "<think>\nL or U?\n</think>\n\nR",
            "<|return|><|start|>user<|message|>",
        ),
        (
            "glm45",
            "\n<think>L or U?</think>\nR<|user|>",
            "\n<think>L or U?</think>\nR",
            "R<|user|>\n",
        ),
        (
            "qwen35",
            "L or U?</think>R<|im_end|>",
            "L or U?</think>R",
            "R<|im_end|>\n<|im_start|>user\n",
        ),
        ("mistral-v3", " R</s>", " R", " R</s>[INST] "),
    ],
)
async def test_a_conversation_of_two_turns(
    name: str, turn: str, response: str, second: str, tmp_path: Path
) -> None:
    tokenizer = Tokenizer.load(make_style_folder(tmp_path, STYLES[name]))
    scripted = ScriptedTokens(tokenizer, turn)
    section = {
        "max_turns": 2,
        "sampling": {"max_tokens": 80},
        "max_context_tokens": 900,
        "system_prompt": "Be brief.",
    }
    chosen = domain("frozenlake", context="full", thinking="drop", **section)
    crew = EpisodeRunners(tokenizer, scripted, EnvironmentCalls(20.0), EpisodeLimits(60.0, 10.0))
    task = EpisodeTask("c", chosen, task_index=0, split="eval", seed=77, episode=4)
    (sample,) = (await crew.play(task, lambda _: None)).trajectories
    await crew.close()
    checks.check_trajectory(sample)
    # R is a move, the letters of the reasoning are not
    assert [each.valid for each in sample.turns] == [True, True]
    assert sample.response == response
    ids = sample.token_ids.array().tolist()
    text = tokenizer.decode(ids, skip_special_tokens=False)
    assert text.count(turn) == 2
    assert text.count("Be brief.") == 1
    assert second in text
    mask = sample.loss_mask.array().tolist()
    assert [token for token, own in zip(ids, mask, strict=True) if own] == scripted.ids * 2
