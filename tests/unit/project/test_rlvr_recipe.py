"""``configs/rlvr.yaml`` with rows as DeepMath-103K, KodCode-V1 and WebInstruct-verified have them,
and with the sizes of models of 7 and of 30 billion parameters (3 active).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from broker.settings.run_settings import RunSettings
from broker.settings.runspec import load, validate
from rlearner.cli import main
from rlearner.plan.facts import GIB, Machine
from rlearner.plan.plans import make_plans
from rlearner.plan.reader import WorkloadReader
from rlearner_text.config import TinyModel
from rlearner_text.tiny import build_tiny

ROWS: dict[str, dict[str, Any]] = {
    "math": {
        "question": "What is 2 + 2?",
        "final_answer": "4",
        "difficulty": 1.0,
        "topic": "Algebra",
    },
    "code": {
        "style": "instruct",
        "question": "Write a function add(a, b).",
        "solution": "def add(a, b):\n    return a + b",
        "test": "from solution import add\n\ndef test_add():\n    assert add(1, 2) == 3\n",
    },
    "general": {
        "question": "Which gas do plants take in?",
        "answer": "carbon dioxide",
        "answer_type": "String",
        "category": "Biology",
    },
}


def overrides(folder: Path) -> list[str]:
    """Write a file of forty rows for each domain, and return the settings that name them."""
    settings = []
    for name, row in ROWS.items():
        rows = [row | {"question": f"{number}: {row['question']}"} for number in range(40)]
        file = folder / f"{name}.jsonl"
        file.write_text("".join(json.dumps(each) + "\n" for each in rows))
        settings.append(f"domains.{name}.env_args.path={file}")
    return settings


def test_published_columns_are_read(tmp_path: Path) -> None:
    settings = RunSettings.of_config(validate(load("configs/rlvr.yaml", overrides(tmp_path))))
    assert {name: domain.weight for name, domain in settings.domains.items()} == {
        "math": 40,
        "code": 30,
        "general": 30,
    }
    assert settings.algorithm.adv_estimator == "reinforce"


# The sizes in the config.json of Qwen2.5-7B and of Qwen3-30B-A3B.
DENSE: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}
EXPERTS: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
}
SMALL = TinyModel(
    hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=64
)


def large_model(folder: Path, config: dict[str, Any]) -> str:
    """Write a model's config.json, a tokenizer, and weights that nothing reads."""
    build_tiny(folder, SMALL)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"model.norm.weight": torch.zeros(1)}, folder / "model.safetensors")
    return str(folder)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("config", "machine", "billions"),
    [(DENSE, Machine(8, 80 * GIB), 7.6), (EXPERTS, Machine(16, 80 * GIB, 2), 30.5)],
    ids=["7B", "30B-A3B"],
)
def test_large_models_fit_their_gpus(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    config: dict[str, Any],
    machine: Machine,
    billions: float,
) -> None:
    path = large_model(tmp_path / "model", config)
    settings = [f"model.path={path}", "model.dtype=bfloat16", *overrides(tmp_path)]
    reader = WorkloadReader("configs/rlvr.yaml", [*settings, "rollout.engine=vllm"])
    work = reader.read()
    assert work.model.parameters / 1e9 == pytest.approx(billions, abs=0.1)
    (plan,) = make_plans(work, machine, 1, reader.read)
    assert plan.learner.ranks == machine.gpus // 2
    assert plan.learner_memory.total() < machine.available
    assert plan.servers * (plan.server.tensor if plan.server else 0) == machine.gpus // 2
    # All that can be checked without the GPUs, vllm and deepspeed.
    assert main(["check", "configs/rlvr.yaml", "--no-trial", *settings]) == 0
    assert "ok" in capsys.readouterr().out
