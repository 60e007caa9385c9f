"""A model of a type that nobody has run is tried in small before a start."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from broker.errors import ConfigError
from broker.settings.run_settings import RunSettings
from broker.settings.runspec import check_settings
from rlearner.doctor import family_trial
from rlearner.doctor.preflight import fleet_findings
from rlearner_text import families
from rlearner_text.config import TinyModel
from rlearner_text.tiny import _write_tokenizer


def config_of(folder: Path, settings: dict[str, Any], **rollout: Any) -> RunSettings:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"vocab_size": 200, **settings}))
    (folder / "model.safetensors").write_bytes(b"")
    _write_tokenizer(folder, TinyModel())
    domains = {"lake": {"env": "frozenlake"}}
    return check_settings(
        {"model": {"path": str(folder)}, "domains": domains, "rollout": {"engine": "hf", **rollout}}
    )


def answer(monkeypatch: pytest.MonkeyPatch, found: dict[str, str]) -> list[list[str]]:
    asked: list[list[str]] = []

    def run(folder: Path, roles: list[str], *, trust_remote_code: bool) -> dict[str, str]:
        asked.append(roles)
        return {role: text for role, text in found.items() if role in roles or role == "problem"}

    monkeypatch.setattr(family_trial, "run_trial", run)
    return asked


def test_unknown_type_is_refused_with_the_reason_of_its_trial(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = answer(monkeypatch, {"learner": "", "engine": "no slots"})
    config = config_of(tmp_path / "model", {"model_type": "xglm"})
    with pytest.raises(
        ConfigError, match="engine hf cannot run a small copy of this xglm: no slots"
    ):
        fleet_findings(config)
    other = config_of(tmp_path / "model", {"model_type": "xglm"}, engine="vllm")
    assert family_trial.family_findings(other) == []
    assert asked == [["learner", "engine"], ["learner"]]


def test_type_that_cannot_be_tried_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    answer(monkeypatch, {"problem": "no class"})
    (finding,) = family_trial.family_findings(config_of(tmp_path / "model", {"model_type": "xglm"}))
    assert (finding.status, finding.found) == (
        "warning",
        "xglm is no family that was run, and no small copy of it could be tried: no class",
    )


def test_known_types_are_not_tried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = answer(monkeypatch, {"learner": "no"})
    assert (
        family_trial.family_findings(config_of(tmp_path / "model", {"model_type": "llama"})) == []
    )
    assert family_trial.family_findings(RunSettings()) == []
    assert asked == []


def test_model_on_the_hub_is_refused_by_the_matrix(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "slotless"}')
    monkeypatch.setattr(family_trial, "tokenizer_folder", lambda path: tmp_path)
    row = families.Family("slotless", "dense", {"engine": "no slots"})
    monkeypatch.setattr(families, "read_matrix", lambda: families.Matrix("5", [row]))
    config = check_settings(
        {"model": {"path": "owner/name"}, "domains": {"lake": {"env": "frozenlake"}}}
    )
    with pytest.raises(ConfigError, match="vllm or sglang with slotless: no slots"):
        family_trial.family_findings(config)


@pytest.mark.timeout(600)
def test_trial_runs_engine_and_learner_on_a_small_copy(tmp_path: Path) -> None:
    """CodeGen has an attention of its own; a Qwen3 of real size is shrunken."""
    large = {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "vocab_size": 151936,
    }
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    kinds = {
        "qwen3": {**large, **heads},
        "codegen": {"n_layer": 28, "n_embd": 4096, "n_head": 16, "rotary_dim": 64},
    }
    answers = {}
    for name, settings in kinds.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"model_type": name, **settings}))
        answers[name] = family_trial.run_trial(
            tmp_path / name, ["learner", "engine"], trust_remote_code=False
        )
    assert answers["qwen3"] == {"learner": "", "engine": ""}
    assert answers["codegen"]["learner"] == ""
    assert "engine hf cannot run CodeGenForCausalLM" in answers["codegen"]["engine"]
