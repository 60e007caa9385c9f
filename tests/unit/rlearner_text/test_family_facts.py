"""The matrix of families as check, doctor and plan read it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from broker.errors import ConfigError
from broker.settings.runspec import validate
from learner.offline import config as offline
from rlearner import cli
from rlearner_text import families
from rlearner_text.config import TinyModel
from rlearner_text.families import WORKS, Family, Matrix
from rlearner_text.tiny import _write_tokenizer

CELLS = ("engine", "packed", "padded", "lora", "weights", "resume", "export", "plan")


def row(name: str, when: dict[str, Any] | None = None, **cells: str) -> Family:
    return Family(name, "dense", {**dict.fromkeys(CELLS, WORKS), **cells}, when or {})


@pytest.fixture
def matrix(monkeypatch: pytest.MonkeyPatch) -> Matrix:
    rows = [
        row("llama"), row("llama.turned", {"rope_parameters.rope_type": "turned"}, padded="positions turn"),
        row("bloom", engine="no slots"), row("mistral", packed="its mask"), row("gpt2", lora="no layers"),
    ]  # fmt: skip
    made = Matrix("5.19.0", rows)
    monkeypatch.setattr(families, "read_matrix", lambda: made)
    return made


def folder(tmp_path: Path, model_type: str, **settings: Any) -> str:
    settings = {
        "model_type": model_type,
        "vocab_size": 200,
        "max_position_embeddings": 8192,
        **settings,
    }
    (tmp_path / "config.json").write_text(json.dumps(settings))
    _write_tokenizer(tmp_path, TinyModel())
    (tmp_path / "model.safetensors").write_bytes(b"")
    return str(tmp_path)


def run_config(path: str, **train: Any) -> dict[str, Any]:
    return {
        "model": {"path": path},
        "domains": {"lake": {"env": "frozenlake"}},
        "train": {"steps": 1, **train},
    }


def test_row_with_the_most_settings_is_meant(matrix: Matrix) -> None:
    turned = {"model_type": "llama", "rope_parameters": {"rope_type": "turned"}}
    assert [families.family_of(config).name for config in ({"model_type": "llama"}, turned)] == [  # type: ignore[union-attr]
        "llama",
        "llama.turned",
    ]
    assert families.family_of({"model_type": "unheard"}) is None


@pytest.mark.parametrize(
    ("model_type", "train", "line"),
    [
        ("bloom", {}, "rollout.engine: 'hf' is not allowed; vllm or sglang with bloom: no slots"),
        (
            "mistral",
            {"packing": "packed"},
            "train.packing: 'packed' is not allowed; auto or padded with mistral: its mask",
        ),
        ("gpt2", {"lora": {}}, "is not allowed; null with gpt2: no layers"),
    ],
)
def test_check_refuses_what_the_matrix_says(
    matrix: Matrix, tmp_path: Path, model_type: str, train: dict[str, Any], line: str
) -> None:
    config = run_config(folder(tmp_path, model_type), **train)
    with pytest.raises(ConfigError) as caught:
        validate(config)
    assert str(caught.value).endswith(line)
    validate({**config, "model": {"path": folder(tmp_path, "llama")}})


def test_training_is_refused_offline_too(matrix: Matrix, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("{}\n")
    path = folder(tmp_path, "llama", rope_parameters={"rope_type": "turned"})
    with pytest.raises(
        ConfigError, match=r"model.path: .* llama cannot be trained: positions turn"
    ):
        offline.validate_config("sft", {"model": {"path": path}, "data": {"train": str(rows)}})
    offline.validate_config(
        "sft", {"model": {"path": folder(tmp_path, "bloom")}, "data": {"train": str(rows)}}
    )


def test_other_engines_serve_what_engine_hf_cannot(matrix: Matrix, tmp_path: Path) -> None:
    validate({**run_config(folder(tmp_path, "bloom")), "rollout": {"engine": "vllm"}})


@pytest.mark.parametrize(
    "command", [["check"], ["doctor"], ["plan", "--gpus", "1", "--gpu-memory", "80"]]
)
def test_commands_refuse_with_exit_code_2(
    matrix: Matrix, tmp_path: Path, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(run_config(folder(tmp_path, "bloom"))))
    assert cli.main([command[0], str(file), *command[1:]]) == 2
    assert "vllm or sglang with bloom: no slots" in capsys.readouterr().err


def test_packaged_matrix_is_complete() -> None:
    matrix = families.read_matrix()
    assert len({family.model_type for family in matrix.families}) >= 45
    assert all(
        reason and "\n" not in reason
        for family in matrix.families
        for reason in family.cells.values()
    )
    assert all(
        "/tmp" not in reason for family in matrix.families for reason in family.cells.values()
    )
