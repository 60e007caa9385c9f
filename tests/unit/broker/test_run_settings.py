"""All settings of a run, typed: parsed from plain values, with nothing left to guess."""

from __future__ import annotations

import pydantic
import pytest

from broker.settings.run_settings import (
    RunSettings,
    stored_domains,
    stored_section,
    stored_value,
)
from broker.settings.runspec import load, validate
from broker.settings.schema.model import ModelSection


def test_settings_survive_the_round_trip_through_a_spec() -> None:
    config = validate(load("quickstart"))
    settings = RunSettings.of_config(config)
    assert settings.to_plain() == config
    assert settings.train.on_late == config["train"]["on_late"]
    assert settings.domains["lake"].group_size == config["domains"]["lake"]["group_size"]


def test_a_left_out_section_has_its_defaults() -> None:
    settings = RunSettings.of_config({"eval": None, "train": {"steps": 7}})
    assert settings.train.steps == 7
    assert settings.train.groups_per_step == 16
    assert settings.eval.group_size == 1
    assert settings.domains == {}


def test_settings_of_another_version_are_left_out() -> None:
    newer = {"train": {"steps": 7, "warp": 9}, "domains": {"d": {"env": "qa", "warp": 9}}}
    settings = RunSettings.of_config(newer | {"warp": {}})
    assert settings.train.steps == 7
    assert settings.domains["d"].env == "qa"


def test_a_value_that_is_not_allowed_is_refused() -> None:
    with pytest.raises(pydantic.ValidationError, match=r"train\.steps"):
        RunSettings.of_config({"train": {"steps": 0}})


def test_settings_are_frozen() -> None:
    settings = RunSettings.of_config({})
    with pytest.raises(pydantic.ValidationError, match="frozen"):
        settings.train = settings.train  # type: ignore[misc]


def test_changed_values_leave_the_rest_and_a_renamed_setting_is_an_error() -> None:
    settings = RunSettings.of_config({"train": {"steps": 7, "lr": 0.5}})
    changed = settings.with_values("train", steps=9)
    assert (changed.train.steps, changed.train.lr, settings.train.steps) == (9, 0.5, 7)
    with pytest.raises(TypeError, match="TrainSection has no field num_steps"):
        settings.with_values("train", num_steps=9)
    with pytest.raises(TypeError, match="RunSettings has no field training"):
        settings.model_copy(update={"training": settings.train})


@pytest.mark.parametrize("folder", [{}, {"train": None}, {"train": "x"}, {"train": {"lr": 1}}])
def test_a_value_that_a_folder_lacks_is_none(folder: dict[str, object]) -> None:
    assert stored_value(folder, "train", "steps") is None


def test_stored_values_are_not_checked_but_their_names_are() -> None:
    folder = {"train": {"steps": "many"}, "domains": {"b": 1, "a": None}, "model": {"path": "m"}}
    assert stored_value(folder, "train", "steps") == "many"
    assert stored_domains(folder) == ["a", "b"]
    assert stored_domains({"domains": "x"}) == []
    assert stored_section(folder, "model", ModelSection).path == "m"
    with pytest.raises(TypeError, match="train has no field num_steps"):
        stored_value(folder, "train", "num_steps")


@pytest.mark.parametrize("values", [{"train": "x"}, {"domains": "x"}, {"domains": {"d": 1}}])
def test_a_section_that_is_no_mapping_is_refused(values: dict[str, object]) -> None:
    with pytest.raises(pydantic.ValidationError):
        RunSettings.of_config(values)
