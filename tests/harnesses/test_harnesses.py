"""Shipped coding agents, unmodified, play an episode whose policy answers by a script: their tool
calls are executed, and what was sampled is what is recorded. By ``make test-harnesses``.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from pathlib import Path

import pytest
from agent_kit import Policy, play_agent, sampled_spans
from template_models import make_tokenizer_folder

from envhub.task import EpisodeResult
from rlearner_text.tokenizer import Tokenizer

PROGRAM = str(Path(__file__).parents[2] / "configs" / "agents" / "harness.py")
MODULES = os.environ.get("RL_HARNESSES_MODULES", "")
PROGRAMS = {
    "claude_code": ("CLAUDE_CODE", "@anthropic-ai/claude-code-linux-x64/claude"),
    "codex": ("CODEX", ".bin/codex"),
}
ADDS = "echo $(($(paste -sd+ numbers.txt))) > sum.txt"
TOOLS = {
    "Bash": {"command": ADDS, "description": "adds"},
    "exec_command": {"cmd": ADDS},
    "shell_command": {"command": ADDS},
    "shell": {"command": ["bash", "-c", ADDS]},
}

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(not MODULES, reason="needs coding agents: make test-harnesses"),
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(make_tokenizer_folder(tmp_path_factory.mktemp("hermes"), "hermes"))


def add_numbers(context: str) -> str:
    """Call the first known tool that is offered, until one has answered."""
    offered = [name for name in TOOLS if re.search(rf'"name": "{name}"', context)]
    if "<tool_response>" in context or not offered:
        return "<think>done</think>\n\nThe sum is in sum.txt."
    call = json.dumps({"arguments": TOOLS[offered[0]], "name": offered[0]})
    return f"<think>\nI add them</think>\nI use a shell.\n<tool_call>\n{call}\n</tool_call>"


async def play(name: str, tokenizer: Tokenizer, policy: Policy) -> EpisodeResult:
    variable, path = PROGRAMS[name]
    args = {"command": ["python", PROGRAM, name], "env": {variable: f"{MODULES}/{path}"}}
    return await play_agent(
        tokenizer,
        policy,
        args,
        timeout_s=300.0,
        max_turns=20,
        max_context_tokens=400_000,
        sampling={"max_tokens": 400},
    )


@pytest.mark.parametrize("name", PROGRAMS)
async def test_a_tool_call_is_executed_and_trained_on(name: str, tokenizer: Tokenizer) -> None:
    policy = Policy(tokenizer, add_numbers)
    episode = await play(name, tokenizer, policy)
    assert episode.trajectory.reward == 1.0
    spans = sampled_spans(episode)
    recorded = Counter(tuple(turn) for sample in spans for turn in sample)
    assert recorded == Counter(map(tuple, policy.sampled))
    # the call and the answer to its result are one sample
    assert max(map(len, spans)) == 2


@pytest.mark.parametrize("name", PROGRAMS)
async def test_an_answer_without_a_call_is_worth_nothing(name: str, tokenizer: Tokenizer) -> None:
    policy = Policy(tokenizer, lambda _: "I would rather not.")
    episode = await play(name, tokenizer, policy)
    assert episode.trajectory.reward == 0.0
    assert sampled_spans(episode)[-1] == [policy.sampled[-1]]
