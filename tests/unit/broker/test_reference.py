"""Descriptions of settings, read from the sections."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field, PositiveInt

from broker.settings.config import Section
from broker.settings.reference import describe_settings, read_meanings
from broker.settings.run_settings import RunSettings, section_types


class BaseSettings(Section):
    """A section with comments in every place."""

    # above,
    # over two lines
    first_s: float | None = None
    second: Literal["a", "b"] = "a"  # behind
    # not of this field

    third: list[PositiveInt] = Field(default_factory=list)


class OwnSettings(BaseSettings):
    """Another default, and a meaning of its own."""

    second: Literal["a", "b"] = "b"
    third: list[PositiveInt] = Field(default_factory=list)  # whole numbers


def test_comments_above_and_behind_a_field_are_its_meaning() -> None:
    meanings = {"first_s": "above, over two lines", "second": "behind", "third": ""}
    assert read_meanings(BaseSettings) == meanings
    assert read_meanings(OwnSettings) == meanings | {"third": "whole numbers"}


def _keys(prefix: str, values: Any) -> Iterator[str]:
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from _keys(f"{prefix}{name}.", value)
        else:
            yield f"{prefix}{name}"


def test_every_setting_of_a_run_is_described_once() -> None:
    described = [setting.key for setting in describe_settings()]
    assert len(described) == len(set(described))
    domain = {"env": "frozenlake", "rewards": [{"name": "format"}]}
    named = {
        "domains": {"DOMAIN": domain},
        "teachers": {"TEACHER": {}},
        "policies": {"POLICY": {"script": "random"}},
    }
    values = RunSettings.model_validate(named).model_dump()
    # of sections, described by key
    lists = {"domains.DOMAIN.rewards", "domains.DOMAIN.examples", "algorithm.rejections"}
    assert set(_keys("", values)) - set(described) == lists
    assert {key.split(".")[0] for key in described} == set(section_types())


def test_values_defaults_and_units() -> None:
    settings = {setting.key: setting for setting in describe_settings()}
    timeout = settings["train.ticket_timeout_s"]
    assert (timeout.allowed, timeout.default, timeout.unit) == (
        "number above 0 or null", "null", "seconds",
    )  # fmt: skip
    assert settings["envhub.min_tokens_per_s"].unit == "tokens per second"
    assert settings["train.betas"].allowed == (
        "[number at least 0 and below 1, number at least 0 and below 1]"
    )
    assert settings["domains.DOMAIN.env"].default == "required"
    assert settings["algorithm.pass_rate"].allowed == (
        "list of number at least 0 and at most 1 or null"
    )
