"""A model from elsewhere runs no code here: pickled weights, and code of a hub's model that anyone
may replace.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
import transformers

from broker.errors import ConfigError, UserError
from learner.backends.models.policy import load_model
from rewardhub.rewards.reward_model import RewardModel, RewardModelArgs
from rewardhub.rewards.scoring_model import ScoringModel
from rlearner_text import hub
from rlearner_text.config import ModelSection, TinyModel
from rlearner_text.tiny import build_tiny
from rollout.config import RolloutSection
from rollout.engines.base import EngineConfig
from rollout.engines.hf import model as hf_model

CALLED = "RLEARNER_TEST_CALLED"
SIZES = TinyModel(
    hidden_size=16,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=16,
    intermediate_size=32,
    vocab="chars",
)
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class _Malicious:
    def __reduce__(self) -> Any:
        return exec, (f"import os; os.environ[{CALLED!r}] = 'yes'",)


@pytest.fixture
def trap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model folder whose only weights are a pickle that runs code."""
    monkeypatch.delenv(CALLED, raising=False)
    folder = tmp_path / "model"
    build_tiny(folder, SIZES)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"model.norm.weight": _Malicious()}))
    return folder


def test_the_pickle_would_run_code(trap: Path) -> None:
    pickle.loads((trap / "pytorch_model.bin").read_bytes())  # noqa: S301 - shows that the trap works
    assert os.environ.pop(CALLED) == "yes"


REFUSED = "pytorch_model.bin is a pickle, which could run code, and is never loaded; convert it in a sandbox"


CPU = torch.device("cpu")
READERS: dict[str, Callable[[str], Any]] = {
    "check": lambda path: hub.check_model(path, "model.path"),
    "learner": lambda path: load_model(path, ModelSection(path=path), CPU),
    "engine": lambda path: hf_model.load_model(
        EngineConfig(path, RolloutSection(), "float32", device="cpu"), CPU
    ),
    "reward model": lambda path: ScoringModel(RewardModelArgs(path=path, dtype="float32")),
}


@pytest.mark.parametrize("reader", READERS)
def test_pickled_weights_are_never_loaded(trap: Path, reader: str) -> None:
    with pytest.raises(UserError) as refused:
        READERS[reader](str(trap))
    assert CALLED not in os.environ
    if reader in ("check", "learner"):
        assert REFUSED in str(refused.value)


def test_safetensors_are_taken_where_both_exist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(CALLED, raising=False)
    folder = tmp_path / "model"
    build_tiny(folder, SIZES)
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"model.norm.weight": _Malicious()}))
    load_model(str(folder), ModelSection(path=str(folder)), torch.device("cpu"))
    assert CALLED not in os.environ


# -------------------------------------------------------------------------------------------------
# the hub


@pytest.fixture
def asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> list[tuple[str, str | None, list[str]]]:
    """What was requested of a hub that answers with a folder of a tiny model."""
    calls: list[tuple[str, str | None, list[str]]] = []
    build_tiny(tmp_path / "snapshot", SIZES)

    def download(name: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        calls.append((name, revision, allow_patterns))
        return str(tmp_path / "snapshot")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return calls


def test_a_revision_is_requested_and_pickles_are_not(
    asked: list[tuple[str, str | None, list[str]]],
) -> None:
    model = load_model(f"acme/tiny@{COMMIT}", ModelSection(path="acme/tiny"), torch.device("cpu"))
    assert isinstance(model, transformers.PreTrainedModel)
    assert {(name, revision) for name, revision, _ in asked} == {("acme/tiny", COMMIT)}
    wanted = {pattern for _, _, patterns in asked for pattern in patterns}
    assert "*.safetensors" in wanted
    assert not {"*", "*.bin", "*.pt", "*.py"} & wanted
    assert not any(pattern.endswith((".bin", ".pt", ".py", ".pkl")) for pattern in wanted)


@pytest.mark.parametrize(
    "path", ["acme/tiny", "acme/tiny@main", "acme/tiny@v1.0", f"acme/tiny@{COMMIT[:12]}"]
)
def test_code_of_a_model_on_the_hub_needs_a_commit(
    path: str, asked: list[tuple[str, str | None, list[str]]]
) -> None:
    rule = "with trust_remote_code name the commit: acme/tiny@ and 40 hexadecimal digits"
    with pytest.raises(ConfigError, match=f"model.path: '{path}' is not allowed; {rule}"):
        hub.model_folder(path, trust_remote_code=True)
    with pytest.raises(ConfigError, match=rule):
        RewardModel.check(RewardModelArgs(path=path, trust_remote_code=True))
    assert asked == []


def test_code_of_one_commit_is_requested(asked: list[tuple[str, str | None, list[str]]]) -> None:
    hub.model_folder(f"acme/tiny@{COMMIT}", trust_remote_code=True)
    assert [(name, revision) for name, revision, _ in asked] == [("acme/tiny", COMMIT)]
    assert "*.py" in asked[0][2]


@pytest.mark.parametrize(
    ("path", "local"),
    [
        ("acme/tiny@main", False),
        ("acme/tiny", False),
        ("acme/tiny@", True),
        ("a@b@c", True),
        ("acme/tiny@-x", True),
    ],
)
def test_what_is_a_hub_name(path: str, local: bool) -> None:
    assert hub.is_local(path) is local
