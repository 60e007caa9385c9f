"""Which models count as the same."""

from __future__ import annotations

from pathlib import Path

from learner.config import WarmStartSection
from learner.credit.model_identity import identify_model
from rlearner_text.config import ModelSection

COLD = WarmStartSection()


def write_model(folder: Path, weights: bytes) -> ModelSection:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(weights)
    return ModelSection(path=str(folder))


def test_equal_weights_are_one_model_wherever_they_are(tmp_path: Path) -> None:
    weights = bytes(range(256)) * 2000
    first = identify_model(write_model(tmp_path / "a", weights), COLD)
    assert first.digest == identify_model(write_model(tmp_path / "b", weights), COLD).digest
    assert first.name == "a"
    other = weights[:-1] + b"x"
    assert first.digest != identify_model(write_model(tmp_path / "c", other), COLD).digest


def test_small_models_are_known_by_their_settings() -> None:
    first = identify_model(ModelSection(), COLD)
    assert first == identify_model(ModelSection(), COLD)
    assert first.digest != identify_model(ModelSection(seed=1), COLD).digest
    assert first.digest != identify_model(ModelSection(), WarmStartSection(steps=3)).digest


def test_names_of_the_hub_are_known_by_name() -> None:
    first = identify_model(ModelSection(path="owner/small"), COLD)
    assert first.name == "owner/small"
    assert first.digest != identify_model(ModelSection(path="owner/large"), COLD).digest
