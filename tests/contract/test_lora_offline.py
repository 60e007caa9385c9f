"""sft, dpo and rm with adapters: they learn, resume with the same bits, and leave a model that
transformers loads and an adapter for peft.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rlearner import cli
from rlearner_text.config import TinyModel
from rlearner_text.tiny import build_tiny

peft = pytest.importorskip("peft", reason="LoRA needs the extra rlearner[lora]")

SIZES = TinyModel(
    hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=64
)
RULE = {"a": "U", "b": "D", "c": "L", "d": "R"}
WRONG = dict(zip(RULE, "DLRU", strict=True))


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("offline")
    build_tiny(folder / "model", SIZES, seed=1)
    prompts = [(letter, letter * n) for n in (1, 2, 3) for letter in RULE]
    sft = [{"prompt": prompt, "response": RULE[letter]} for letter, prompt in prompts]
    dpo = [
        {"prompt": prompt, "chosen": RULE[letter], "rejected": WRONG[letter]}
        for letter, prompt in prompts
    ]
    for name, rows in (("sft", sft), ("dpo", dpo), ("rm", dpo)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def words(place: Path, pipeline: str, name: str, *more: str) -> list[str]:
    settings = {
        "run.name": name, "run.dir": place / "runs", "model.path": place / "model",
        "data.train": place / f"{pipeline}.jsonl",
        "data.eval_share": 0, "train.batch_size": 6, "train.lr": 3e-2, "train.num_threads": 1, "train.steps": 20,
        "trackers.use": "[]",
        "train.lr_schedule": "constant", "train.warmup_steps": 0, "train.lora.rank": 8, "checkpoint.every_steps": 10,
    }  # fmt: skip
    return [
        pipeline,
        f"configs/{pipeline}.yaml",
        *(f"{key}={value}" for key, value in settings.items()),
        *more,
    ]


def metrics(place: Path, name: str) -> list[dict[str, float]]:
    lines = (place / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return [
        {key: value for key, value in json.loads(line).items() if key.startswith("train/")}
        for line in lines
    ]


@pytest.mark.parametrize(
    ("pipeline", "name", "least"),
    [("sft", "train/loss", 0.92), ("dpo", "train/loss", 0.97), ("rm", "train/loss", 0.9)],
)
def test_it_learns_and_resumes(place: Path, pipeline: str, name: str, least: float) -> None:
    assert cli.main(words(place, pipeline, f"{pipeline}-whole")) == 0
    whole = metrics(place, f"{pipeline}-whole")
    # a random model with a frozen head does not come far
    assert whole[-1][name] < least * whole[0][name]
    assert cli.main(words(place, pipeline, f"{pipeline}-parts", "train.steps=10")) == 0
    assert cli.main(words(place, pipeline, f"{pipeline}-parts")) == 0
    assert metrics(place, f"{pipeline}-parts") == whole
    folders = [
        place / "runs" / f"{pipeline}-{kind}" / "checkpoints" / "step-000020"
        for kind in ("whole", "parts")
    ]
    for file in (
        "model.safetensors",
        "adapter/adapter_model.safetensors",
        "learner/part-00001-of-00001.safetensors",
    ):
        assert (folders[0] / file).read_bytes() == (folders[1] / file).read_bytes()
    kind = AutoModelForCausalLM
    base = place / "model"
    if pipeline == "rm":
        kind = AutoModelForSequenceClassification
        base = folders[0].parents[1] / "classifier"
    merged = kind.from_pretrained(folders[0])
    adapted = peft.PeftModel.from_pretrained(
        kind.from_pretrained(base), folders[0] / "adapter"
    ).eval()
    ids = torch.arange(24)[None]
    torch.testing.assert_close(merged(ids).logits, adapted(ids).logits, rtol=1e-4, atol=1e-4)


def test_another_rank_is_another_run(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words(place, "sft", "sft-again", "train.steps=1")) == 0
    assert cli.main(words(place, "sft", "sft-again", "train.steps=2", "train.lora.rank=4")) == 2
    assert (
        "error: train.lora.rank: differs from what run sft-again was started with"
        in capsys.readouterr().err
    )
