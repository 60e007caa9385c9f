"""Agents written on other libraries, unmodified and with their defaults: each plays and trains five
steps. By ``make test-frameworks``.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml

from rlearner_text.tokenizer import Tokenizer

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
from template_models import make_tokenizer_folder  # noqa: E402

PYTHON, MODULES = os.environ.get("RL_FRAMEWORKS_PYTHON"), os.environ.get("RL_FRAMEWORKS_MODULES")
# It needs an older openai package than the others.
OWN_PYTHONS = {"llamaindex_agent.py": os.environ.get("RL_LLAMAINDEX_PYTHON", PYTHON)}
STEPS = 5
TOKENS = 16384  # smolagents' own prompts have 7,000 of this model's small tokens
AGENTS = sorted(
    path.name
    for path in (HERE / "agents").iterdir()
    if path.suffix in (".py", ".mjs") and path.stem != "common"
)

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not (PYTHON and MODULES), reason="needs other frameworks: make test-frameworks"
    ),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random model whose chat template has tools."""
    made = make_tokenizer_folder(tmp_path_factory.mktemp("model"), "hermes")
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    config = transformers.Qwen3Config(
        **sizes, head_dim=16, vocab_size=Tokenizer.load(made).vocab_size, bos_token_id=None, eos_token_id=2,
        pad_token_id=0,
        max_position_embeddings=TOKENS, tie_word_embeddings=True,
    )  # fmt: skip
    transformers.Qwen3ForCausalLM(config).save_pretrained(made)
    return made


def up(
    command: list[str], model: Path, folder: Path, **sections: dict[str, Any]
) -> subprocess.CompletedProcess[str]:
    """A whole run ``r`` in ``folder / "runs"`` whose agent is ``command``."""
    config: dict[str, Any] = {
        "run": {"dir": str(folder / "runs"), "name": "r"},
        "model": {"path": str(model)},
        "domains": {
            "d": {
                "env": "agent", "context": "steps", "group_size": 2, "max_turns": 12, "max_context_tokens": TOKENS,
                "env_args": {
                    "command": command, "num_tasks": 64,
                    "env": {"OPENAI_AGENTS_DISABLE_TRACING": "1"},  # it would send traces to OpenAI
                },
                "sampling": {"max_tokens": 120},
            }
        },
        "train": {"steps": STEPS, "groups_per_step": 1, "max_staleness": 1, "lr": 1.0e-4, "micro_batch_tokens": TOKENS,
            "num_threads": 1},
        "algorithm": {"adv_estimator": "grpo", "pg_variant": "ppo"},
        "rollout": {"engine": "hf", "max_running": 8, "max_context_tokens": TOKENS, "num_threads": 1,
            "engine_args": {"kv_slots": 8}},
        "envhub": {"n": 4, "episode_timeout_s": 300.0},
        **sections,
    }  # fmt: skip
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    start = [sys.executable, "-m", "rlearner.cli", "up", str(folder / "config.yaml")]
    return subprocess.run(
        start,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=800,
        check=False,
    )


@pytest.mark.parametrize("name", AGENTS)
def test_an_agent_plays_and_trains(name: str, model: Path, tmp_path: Path) -> None:
    assert PYTHON is not None
    assert MODULES is not None
    agents = shutil.copytree(HERE / "agents", tmp_path / "agents")
    (tmp_path / "node_modules").symlink_to(MODULES)
    program = OWN_PYTHONS.get(name, PYTHON) if name.endswith(".py") else "node"
    assert program is not None
    ended = up([program, str(agents / name)], model, tmp_path)
    assert ended.returncode == 0, ended.stdout[-4000:]
    rows = [
        json.loads(line)
        for line in (tmp_path / "runs" / "r" / "metrics.jsonl").read_text().splitlines()
    ]
    assert len(rows) == STEPS
    assert all(row["response_length/mean"] > 0 for row in rows)  # of tokens that are trained on
    assert rows[-1]["ticket/trained"] == STEPS


def test_an_agent_whose_requests_are_always_refused_ends_the_run(
    model: Path, tmp_path: Path
) -> None:
    assert PYTHON is not None
    agent = (
        "from openai import OpenAI; OpenAI().chat.completions.create(model='m', messages=[{'role': 'user', "
        "'content': 'hi'}], n=0)"
    )
    ended = up([PYTHON, "-c", agent], model, tmp_path, failures={"give_up_after_s": 20.0})
    last = ended.stdout.splitlines()[-1]
    assert ended.returncode == 2, ended.stdout[-4000:]
    assert last.startswith(
        "error: learner: for 20 s every hub of domain d was broken and no group was trained: envhub-1: domain d: "
    )
    refusal = "n: 0 is not allowed; input should be greater than or equal to 1"
    assert (
        f"the agent ended with exit code 1: openai.BadRequestError: Error code: 400 - {refusal}; fix that"
        in last
    )
