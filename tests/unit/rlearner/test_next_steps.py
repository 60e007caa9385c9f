"""What ``rlearner up`` proposes at its end, for runs of different kinds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlearner.up.next_steps import next_steps

RESUME = "go on with this run: rlearner up runs/a"
EVALUATED = {"step": 4, "eval/step": 4.0, "eval/success_rate": 0.5}


def run_folder(folder: Path, *, model: str | None, file: str = "") -> Path:
    """A run of four steps with a checkpoint of the last one, which holds ``file``."""
    # YAML includes JSON.
    settings = {"train": {"steps": 4}, "model": {"path": model}}
    path = folder / "checkpoints" / "step-000004" / file
    (path.parent if file else path).mkdir(parents=True)
    if file:
        path.write_bytes(b"")
    (folder / "config.yaml").write_text(json.dumps(settings))
    return folder


def test_run_that_was_stopped_goes_on_first(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, model="Qwen/Qwen3-0.6B")
    curves = f"see the curves: tensorboard --logdir {folder}/tensorboard"
    assert next_steps(folder, [{"step": 3}], RESUME) == [RESUME, curves]
    assert next_steps(folder, [], RESUME) == [RESUME]


def test_small_model_that_was_evaluated_is_no_model_to_use(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, model=None, file="model.safetensors")
    curves = f"see the curves: tensorboard --logdir {folder}/tensorboard"
    assert next_steps(folder, [EVALUATED], RESUME) == [curves, RESUME]


@pytest.mark.parametrize(
    ("file", "use"),
    [
        ("model.safetensors", "load the model with transformers or vLLM: {checkpoint}"),
        ("adapter/adapter.safetensors", "load the adapter with peft or vLLM: {checkpoint}/adapter"),
        ("", "write the model for transformers or vLLM: rlearner export {folder}"),
    ],
)
def test_pretrained_model_is_used_and_measured(tmp_path: Path, file: str, use: str) -> None:
    folder = run_folder(tmp_path, model="Qwen/Qwen3-0.6B", file=file)
    checkpoint = folder / "checkpoints" / "step-000004"
    assert next_steps(folder, [{"step": 4}], RESUME) == [
        use.format(folder=folder, checkpoint=checkpoint),
        f"measure it on held-out tasks: rlearner eval {checkpoint} {folder}",
        RESUME,
    ]
