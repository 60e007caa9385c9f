"""Shipped coding agents, unmodified, play groups of episodes whose policy answers by a script: their
tool calls are executed, and what was sampled is what is recorded. By ``make test-harnesses``.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from agent_kit import Policy, agent_runners, agent_task, sampled_spans
from template_models import make_tokenizer_folder

from envhub.task import EpisodeResult
from rlearner_text.tokenizer import Tokenizer

PROGRAM = str(Path(__file__).parents[2] / "configs" / "agents" / "harness.py")
MODULES = os.environ.get("RL_HARNESSES_MODULES", "")
PYTHON_BIN = os.environ.get("RL_HARNESSES_BIN", "")
FIGURES = os.environ.get("RL_HARNESSES_FIGURES", "")
PROGRAMS = {
    "claude_code": ("CLAUDE_CODE", f"{MODULES}/@anthropic-ai/claude-code-linux-x64/claude"),
    "codex": ("CODEX", f"{MODULES}/.bin/codex"),
    "opencode": ("OPENCODE", f"{MODULES}/opencode-linux-x64/bin/opencode"),
    "mini_swe_agent": ("MINI_SWE_AGENT", f"{PYTHON_BIN}/mini"),
}
NUM_GROUPS = 2
GROUP_SIZE = 4
ADDS = "echo $(($(paste -sd+ numbers.txt))) > sum.txt"
FORGETS = "echo 0 > sum.txt"
# mini-swe-agent ends by a command
SUBMITS = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"

pytestmark = [
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not MODULES, reason="needs coding agents: make test-harnesses"),
]


def arguments_of(tool: str, command: str) -> dict[str, Any]:
    return {
        "Bash": {"command": command, "description": "adds"},
        "bash": {"command": command, "description": "adds"},
        "exec_command": {"cmd": command},
        "shell_command": {"command": command},
        "shell": {"command": ["bash", "-c", command]},
    }[tool]


TOOLS = ("Bash", "bash", "exec_command", "shell_command", "shell")


@dataclass
class Script:
    """Calls the first known tool that is offered, then ends; a title or summary gets a text."""

    name: str
    command: str = ADDS

    def __call__(self, context: str) -> str:
        offered = [tool for tool in TOOLS if re.search(rf'"name": "{tool}"', context)]
        if not offered:
            return "<think>done</think>\n\nThe sum is in sum.txt."
        if "<tool_response>" not in context:
            return self.call(context, offered[0], self.command)
        if self.name == "mini_swe_agent":
            return self.call(context, offered[0], SUBMITS)
        return "<think>done</think>\n\nThe sum is in sum.txt."

    def call(self, context: str, tool: str, command: str) -> str:
        arguments = arguments_of(tool, command)
        if self.name == "mini_swe_agent":
            arguments = {"command": command}
        text = json.dumps({"arguments": arguments, "name": tool})
        return f"<think>\nI add them</think>\nI use a shell.\n<tool_call>\n{text}\n</tool_call>"


@dataclass
class Tally:
    """What all harnesses played."""

    rewards: dict[str, list[list[float]]] = field(default_factory=dict)
    sampled: Counter[tuple[int, ...]] = field(default_factory=Counter)
    trained: Counter[tuple[int, ...]] = field(default_factory=Counter)

    def figures(self) -> dict[str, Any]:
        both = (self.sampled & self.trained).items()
        equal = sum(len(turn) * count for turn, count in both)
        whole = (self.sampled | self.trained).items()
        tokens = sum(len(turn) * count for turn, count in whole)
        return {
            "harnesses": len(self.rewards),
            "episodes": {name: sum(map(len, groups)) for name, groups in self.rewards.items()},
            "groups_with_both_rewards": {
                name: sum(set(group) == {0.0, 1.0} for group in groups)
                for name, groups in self.rewards.items()
            },
            "trained_tokens_equal_sampled": round(equal / tokens, 6) if tokens else 0.0,
            "trained_tokens": sum(len(turn) * count for turn, count in self.trained.items()),
        }


@pytest.fixture(scope="module")
def tally() -> Iterator[Tally]:
    tally = Tally()
    yield tally
    if FIGURES:
        Path(FIGURES).write_text(json.dumps(tally.figures()), encoding="utf-8")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(make_tokenizer_folder(tmp_path_factory.mktemp("hermes"), "hermes"))


async def play(
    name: str, tokenizer: Tokenizer, policy: Policy, *, group: int = 0, episode: int = 0
) -> EpisodeResult:
    variable, path = PROGRAMS[name]
    args = {"command": ["python", PROGRAM, name], "env": {variable: path}}
    task = agent_task(args, max_turns=20, max_context_tokens=400_000, sampling={"max_tokens": 400})
    # the episodes of a group do the same task
    task = replace(task, id=f"hub.{group}.{episode}", task_index=group, seed=group, episode=episode)
    runners = agent_runners(tokenizer, policy, timeout_s=600.0)
    try:
        return await runners.play(task, lambda _: None)
    finally:
        await runners.close()


@pytest.mark.parametrize("name", PROGRAMS)
async def test_groups_hold_both_rewards_of_executed_calls(
    name: str, tokenizer: Tokenizer, tally: Tally
) -> None:
    groups = tally.rewards.setdefault(name, [])
    for group in range(NUM_GROUPS):
        rewards = []
        for episode in range(GROUP_SIZE):
            command = FORGETS if episode % 2 else ADDS
            policy = Policy(tokenizer, Script(name, command))
            played = await play(name, tokenizer, policy, group=group, episode=episode)
            spans = sampled_spans(played)
            recorded = Counter(tuple(turn) for sample in spans for turn in sample)
            sampled = Counter(map(tuple, policy.sampled))
            assert recorded == sampled
            # the call and the answer to its result are one sample
            assert max(map(len, spans)) == 2
            tally.trained += recorded
            tally.sampled += sampled
            # all samples, those of titles too, share the reward of the episode
            assert len({sample.reward for sample in played.trajectories}) == 1
            rewards.append(played.trajectory.reward)
        groups.append(rewards)
        assert rewards == [float(episode % 2 == 0) for episode in range(GROUP_SIZE)]


@pytest.mark.parametrize("name", PROGRAMS)
async def test_an_answer_without_a_call_is_worth_nothing(name: str, tokenizer: Tokenizer) -> None:
    policy = Policy(tokenizer, lambda _: "I would rather not.")
    episode = await play(name, tokenizer, policy)
    assert episode.trajectory.reward == 0.0
    turns = [tuple(turn) for sample in sampled_spans(episode) for turn in sample]
    assert Counter(turns) == Counter(map(tuple, policy.sampled))
