"""The contract of rewards, over their registry: arguments are checked, scores are finite, and equal
samples score equally.
"""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from broker.errors import ConfigError
from broker.settings.config import Section
from broker.settings.registry import resolve
from broker.settings.sections import parse
from rewardhub import protocol
from rewardhub.rewards import REWARDS
from rewardhub.rewards.base import Sample
from rewardhub.worker import RewardWorker

# The least arguments of each, a response and its reference, and the score; None: another process or
# a model scores it.
CASES: dict[str, tuple[dict[str, Any], str, str, float | None]] = {
    "math_answer": ({}, "So 2 + 2 is #### 4", "#### 4", 1.0),
    "format": ({"pattern": "<answer>.*</answer>"}, "<answer>4</answer>", "", 1.0),
    "length": ({"max_tokens": 10, "cache_tokens": 4}, "x", "", -0.5),
    "code": (
        {},
        "```python\ndef f(x): return x + 1\n```",
        json.dumps(["assert f(1) == 2", "assert f(1) == 3"]),
        0.5,
    ),
    "verifier": ({}, "The answer is Paris.", "paris", 1.0),
    "instruction_following": ({}, "no comma", "", 1.0),
    "rubric": ({"base_url": "http://127.0.0.1:9/v1"}, "", "", None),
    "judge": ({"base_url": "http://127.0.0.1:9/v1"}, "", "", None),
    "reward_model": ({"path": "somebody/model"}, "", "", None),
    "process_reward": ({"path": "somebody/model"}, "", "", None),
    "implicit_reward": ({"path": "somebody/model", "reference": "somebody/other"}, "", "", None),
}


def test_every_reward_has_a_case() -> None:
    assert set(CASES) == set(REWARDS)


@pytest.mark.parametrize("name", sorted(REWARDS))
def test_arguments_are_a_section_that_refuses_unknown_keys(name: str) -> None:
    reward, (args, *_) = resolve("rewards", name, REWARDS), CASES[name]
    assert issubclass(reward.Args, Section)
    assert parse("args", args, reward.Args)
    with pytest.raises(ConfigError, match=r"args\.no_such_key: 1 is not allowed; unknown key"):
        parse("args", {**args, "no_such_key": 1}, reward.Args)
    assert (reward.__doc__ or "").strip()


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.sandbox] if name == "code" else [])
        for name in sorted(CASES)
        if CASES[name][3] is not None
    ],
)
def test_equal_samples_score_equally(name: str) -> None:
    args, response, reference, expected = CASES[name]
    sample = Sample(
        domain="d", task_index=0, prompt="2 + 2?", response=response, reference=reference, reward=0.0, reward_parts={},
        success=False,
        end="terminated", num_turns=1, num_tokens=8, metrics={},
        row={"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]},
    )  # fmt: skip
    worker = RewardWorker()
    try:
        first, again = (worker.answer(protocol.ScoreRequest(name, args, sample)) for _ in range(2))
    finally:
        worker.close()
    assert isinstance(first, protocol.ScoreReply), first
    assert isinstance(again, protocol.ScoreReply), again
    assert first.value == again.value == expected
    assert isinstance(first.value, float)
    assert math.isfinite(first.value)
    assert all(math.isfinite(note) for note in first.notes.values())
