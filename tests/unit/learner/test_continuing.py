"""What a run that goes on may change, and what it may not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from broker.errors import ConfigError, UserError
from broker.settings.config import DomainSection
from broker.settings.run_settings import RunSettings
from learner.prepare import to_yaml
from learner.resume_checks import check_changes, format_change, setting_changes
from learner.run_folder import note_epoch
from rlearner_text.config import TinyModel
from rlearner_text.tiny import build_tiny

SIZES = {
    "hidden_size": 16,
    "num_layers": 1,
    "num_heads": 1,
    "num_kv_heads": 1,
    "head_dim": 16,
    "intermediate_size": 32,
}
TINY = TinyModel.model_validate(SIZES)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders: ``first``, ``again`` of the same shapes, ``wider``, ``wordy`` with one more token in
    the same shapes.
    """
    folder = tmp_path_factory.mktemp("models")
    build_tiny(folder / "first", TINY)
    build_tiny(folder / "again", TINY, seed=1)
    build_tiny(folder / "wider", TINY.model_copy(update={"intermediate_size": 48}))
    shutil.copytree(folder / "first", folder / "wordy")
    tokenizer = folder / "wordy" / "tokenizer.json"
    tokenizer.write_text(
        tokenizer.read_text()
        .replace('"content": "<|unk|>"', '"content": "<|odd|>"')
        .replace('"<|unk|>": 1', '"<|odd|>": 1')
    )
    return folder


def settings(models: Path, **model: Any) -> RunSettings:
    named = {
        "path": str(models / "first"),
        "seed": 0,
        "tiny": TINY.model_dump(),
        "dtype": "float32",
    } | model
    return RunSettings.of_config(
        {
            "run": {"name": "mine"},
            "model": named,
            "domains": {"lake": {"env": "frozenlake"}},
            "train": {"lr": 1e-5},
        }
    )


@pytest.fixture
def begun(tmp_path: Path, models: Path) -> Path:
    """A run's folder with a checkpoint, begun with ``first``."""
    shutil.copytree(models / "first", tmp_path / "checkpoints" / "step-000004")
    (tmp_path / "config.yaml").write_text(to_yaml(settings(models).to_plain()))
    note_epoch(tmp_path, 1, "")
    return tmp_path


def test_each_setting_that_changed_is_one_line() -> None:
    before = {
        "train": {"lr": 1e-5, "steps": 4},
        "domains": {"a": {"env": "qa"}, "b": {"env": "x" * 99}},
    }
    after = {
        "train": {"lr": 2e-5, "steps": 4, "lora": {"rank": 8}},
        "domains": {"a": {"env": "qa", "args": {"n": [1]}}},
    }
    assert [format_change(change) for change in setting_changes(before, after)] == [
        "train.lr: 1e-05 -> 2e-05",
        'train.lora: null -> {"rank": 8}',
        'domains.a.args: null -> {"n": [1]}',
        f'domains.b: {{"env": "{"x" * 71}… -> null',
    ]


def test_what_may_change_is_listed_and_a_new_run_has_nothing_to_compare(
    begun: Path, models: Path
) -> None:
    after = settings(models, dtype="bfloat16").with_values("train", lr=2e-5)
    assert check_changes(begun, after, force=False) == [
        'model.dtype: "float32" -> "bfloat16"',
        "train.lr: 1e-05 -> 2e-05",
    ]
    assert check_changes(begun / "none", after, force=False) == []


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "wider",
            "its intermediate_size is 48, that of {held} is 32: a run cannot change that; choose another run.name",
        ),
        (
            "wordy",
            "its tokenizer is not that of {held} (2 tokens differ): a run cannot change that; choose another run.name",
        ),
        (
            "none",
            "no such folder; give a Hugging Face model folder or hub name such as Qwen/Qwen3-0.6B",
        ),
    ],
)
def test_a_model_of_another_shape_or_tokenizer_is_refused(
    begun: Path, models: Path, name: str, said: str, force: bool
) -> None:
    with pytest.raises(ConfigError) as refused:
        check_changes(begun, settings(models, path=str(models / name)), force=force)
    held = begun / "checkpoints" / "step-000004"
    assert (
        str(refused.value)
        == f"model.path: {str(models / name)!r} is not allowed; {said.format(held=held)}"
    )


def test_a_model_that_is_replaced_under_the_same_path_is_refused(
    begun: Path, models: Path, tmp_path: Path
) -> None:
    moving = tmp_path / "moving"
    shutil.copytree(models / "first", moving)
    (begun / "config.yaml").write_text(to_yaml(settings(models, path=str(moving)).to_plain()))
    assert check_changes(begun, settings(models, path=str(moving)), force=False) == []
    shutil.rmtree(moving)
    shutil.copytree(models / "wider", moving)
    with pytest.raises(ConfigError, match="its intermediate_size is 48"):
        check_changes(begun, settings(models, path=str(moving)), force=False)


def test_another_model_of_the_same_shapes_needs_force(begun: Path, models: Path) -> None:
    again = settings(models, path=str(models / "again"))
    with pytest.raises(
        ConfigError,
        match=r"run mine began with '.*first': choose another run.name, or --force to continue from .*step-000004",
    ):
        check_changes(begun, again, force=False)
    assert check_changes(begun, again, force=True) == [
        f"model.path: {json.dumps(str(models / 'first'))} -> {json.dumps(str(models / 'again'))}"
    ]


@pytest.mark.parametrize("place", ["checkpoints/step-000004", "warm_start", "model"])
def test_a_changed_tiny_model_is_not_ignored(tmp_path: Path, models: Path, place: str) -> None:
    """Nor where the run was ended before its first checkpoint: what was made stays what it is."""
    shutil.copytree(models / "first", tmp_path / place)
    (tmp_path / "config.yaml").write_text(to_yaml(settings(models, path=None).to_plain()))
    wider = settings(models, path=None, tiny=TINY.model_dump() | {"hidden_size": 32})
    with pytest.raises(
        ConfigError,
        match=r"^model.tiny.hidden_size: 32 is not allowed; run mine began with 16: a run cannot change that",
    ):
        check_changes(tmp_path, wider, force=True)
    with pytest.raises(
        ConfigError,
        match=r"^model.seed: 7 is not allowed; run mine began with 0: choose another run.name, or --force",
    ):
        check_changes(tmp_path, settings(models, path=None, seed=7), force=False)
    assert check_changes(tmp_path, settings(models, path=None, seed=7), force=True) == [
        "model.seed: 0 -> 7"
    ]
    (tmp_path / "config.yaml").write_text(to_yaml(settings(models).to_plain()))
    with pytest.raises(
        ConfigError,
        match=r"^model.path: None is not allowed; run mine began with '.*first': a run cannot change that",
    ):
        check_changes(tmp_path, settings(models, path=None), force=True)


def test_a_run_keeps_one_of_its_domains(begun: Path, models: Path) -> None:
    lake = DomainSection(env="frozenlake")
    sums = DomainSection(env="qa")
    after = settings(models).model_copy(update={"domains": {"sums": sums, "lake": lake}})
    (added,) = check_changes(begun, after, force=False)
    assert added.startswith('domains.sums: null -> {"env": "qa", ')
    after = after.model_copy(update={"domains": {"sums": sums}})
    with pytest.raises(ConfigError) as refused:
        check_changes(begun, after, force=False)
    allowed = (
        "run mine has trained lake: keep one of them, choose another run.name, or give --force"
    )
    assert str(refused.value) == f"domains: 'sums' is not allowed; {allowed}"
    removed, added = check_changes(begun, after, force=True)
    assert removed.startswith('domains.lake: {"env": "frozenlake", ')
    assert removed.endswith("… -> null")
    assert added.startswith('domains.sums: null -> {"env": "qa", ')


@pytest.mark.parametrize("text", ["[1]", "a: ["])
def test_settings_that_cannot_be_read_are_named(begun: Path, models: Path, text: str) -> None:
    (begun / "config.yaml").write_text(text)
    with pytest.raises(UserError, match=r"config.yaml: (expected a mapping|cannot be read)"):
        check_changes(begun, settings(models), force=False)
