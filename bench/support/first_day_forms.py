"""Forms of data and of reward functions that newcomers bring, and the smallest own task."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from bench.support.row_files import write_rows

OWN_TASK: Final = """\
model:
  path: null
  tiny: {hidden_size: 64, num_layers: 2, num_heads: 2, num_kv_heads: 2, head_dim: 32, intermediate_size: 128, vocab: chars}
domains:
  mine:
    env: qa
    env_args: {path: questions.jsonl}
    max_context_tokens: 128
    sampling: {max_tokens: 16}
    rewards: [{name: "./rewards.py:score"}]
"""
PYTHON: Final = """\
import rlearner
def distinct(completions, **row): return [len(set(text)) / 40 for text in completions]
rlearner.train("tiny", "questions.jsonl", distinct, train={"steps": 1})
"""
# Rewards that differ between the replies of an untrained model, and fail on a lost reference.
REWARDS: Final = """\
from rewardhub.rewards.base import NoScore


def variety(text):
    return len(set(text)) / 40


def score(sample):
    if sample.reference != "4":
        raise NoScore(f"reference {sample.reference!r}")
    return variety(sample.response)


def parts(sample):
    return {"variety": score(sample), "brevity": -len(sample.response) / 40}


def turns(sample):
    return [variety(turn["content"]) for turn in sample.messages if turn["role"] == "assistant"]


def trl(completions, answer, **columns):
    assert answer == ["4"], answer
    return [variety(text) for text in completions]


def verl(data_source, solution_str, ground_truth, extra_info=None):
    assert ground_truth == "4", ground_truth
    return {"score": variety(solution_str), "length": len(solution_str)}
"""
REWARD_FORMS: Final = ("score", "parts", "turns", "trl", "verl")

ASK: Final = {"role": "user", "content": "2 + 2?"}
FOUR: Final = {"role": "assistant", "content": "4"}
FIVE: Final = {"role": "assistant", "content": "5"}
SYSTEM: Final = {"role": "system", "content": "Be short."}
VERL: Final = {
    "data_source": "sums",
    "prompt": [SYSTEM, ASK],
    "reward_model": {"style": "rule", "ground_truth": "4"},
    "extra_info": {"index": 1},
}
VERL_COLUMNS: Final = {"question": "prompt", "answer": "reward_model.ground_truth"}
TRL_COLUMNS: Final = {"question": "prompt", "answer": "solution"}
TEXTS: Final = {"question": "2 + 2?", "answer": "4", "source": "by hand"}
# file to a row of it
ROWS: Final[Mapping[str, Mapping[str, Any]]] = {
    "questions.jsonl": TEXTS,
    "questions.csv": TEXTS,
    "questions.json": TEXTS,
    "solutions.jsonl": {"question": "2 + 2?", "answer": "It is\n#### 4"},
    "trl.jsonl": {"prompt": [ASK], "solution": "4", "level": None},
    "verl.parquet": VERL,
    "messages.jsonl": {"messages": [SYSTEM, ASK, FOUR]},
    "completions.parquet": {"prompt": [ASK], "completion": [FOUR]},
    "sharegpt.jsonl": {
        "conversations": [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4"}]
    },
    "pairs.jsonl": {"prompt": "2 + 2?", "chosen": "4", "rejected": "5"},
    "implicit.parquet": {"chosen": [ASK, FOUR], "rejected": [ASK, FIVE]},
}
# arguments of ``qa``
FORMATS: Final[Mapping[str, Mapping[str, str]]] = {
    "texts, JSON Lines": {"path": "questions.jsonl"},
    "texts, CSV": {"path": "questions.csv"},
    "texts, JSON": {"path": "questions.json"},
    "worked solutions": {"path": "solutions.jsonl", "answer_after": "####"},
    "message lists as TRL": {"path": "trl.jsonl", **TRL_COLUMNS},
    "nested columns as verl, Parquet": {"path": "verl.parquet", **VERL_COLUMNS},
}
# commands and their files
OFFLINE: Final = {
    "sft: messages": ("sft", "messages.jsonl"),
    "sft: prompt and completion, Parquet": ("sft", "completions.parquet"),
    "sft: ShareGPT": ("sft", "sharegpt.jsonl"),
    "dpo: texts": ("dpo", "pairs.jsonl"),
    "dpo: implicit prompt, Parquet": ("dpo", "implicit.parquet"),
}


def write_inputs(folder: Path) -> None:
    """Write the task, the rewards, and twenty equal rows in each form."""
    (folder / "task.yaml").write_text(OWN_TASK, encoding="utf-8")
    (folder / "rewards.py").write_text(REWARDS, encoding="utf-8")
    for name, row in ROWS.items():
        write_rows(folder / name, [dict(row)] * 20)
