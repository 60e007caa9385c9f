"""The section ``policies``: one kind of player each, and what a host accepts of a stranger."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from broker.settings.consent import refused_settings
from broker.settings.host_rules import HostRules
from broker.settings.schema.policies import PolicySection

ENDPOINT = {"base_url": "https://host/v1", "model": "m"}


@pytest.mark.parametrize(
    "values",
    [
        {"model_path": "runs/a/step-1", "engine": "hf", "tokenizer": "own", "temperature": 0.0},
        {**ENDPOINT, "api_key": {"env": "KEY"}, "max_tokens": 9, "system_prompt": "Be brief."},
        {"script": "random", "args": {"choices": ["a"]}},
        # a value that says nothing, as a resolved configuration has it
        {"script": "random", "engine_args": {}, "max_tokens": 512, "tokenizer": "same"},
    ],
)
def test_each_kind_has_its_own_fields(values: dict[str, Any]) -> None:
    section = PolicySection.model_validate(values)
    assert PolicySection.model_validate(section.to_plain()) == section


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({}, "give one of model_path, base_url, script, not none"),
        ({**ENDPOINT, "script": "random"}, "not base_url, script"),
        ({**ENDPOINT, "engine": "hf"}, "engine belongs to model_path, and this has base_url"),
        ({"script": "random", "api_key": {"env": "K"}}, "api_key belongs to base_url"),
        ({"model_path": "m", "args": {"a": 1}}, "args belongs to script"),
        ({"base_url": "https://host/v1"}, "base_url needs model"),
        ({"base_url": "ftp://host", "model": "m"}, "expected http"),
        ({**ENDPOINT, "api_key": "sk-123"}, "say where the secret is"),
    ],
)
def test_fields_of_another_kind_are_refused(values: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        PolicySection.model_validate(values)


@pytest.mark.parametrize(
    ("policy", "needs"),
    [
        ({"script": "random", "args": {"choices": ["a"]}}, []),
        ({"script": "mine.py:Player"}, [("policies.p.script", "trust")]),
        (ENDPOINT, [("policies.p.base_url", "endpoint")]),
        (
            {**ENDPOINT, "api_key": {"env": "KEY"}},
            [("policies.p.base_url", "endpoint"), ("policies.p.api_key", "secret")],
        ),
        ({"model_path": "Qwen/Qwen3-0.6B", "engine": "hf"}, []),
    ],
)
def test_what_a_stranger_may_have_play(
    policy: dict[str, Any], needs: list[tuple[str, str]]
) -> None:
    config = {
        "domains": {"a": {"env": "tic_tac_toe", "seats": {"X": "actor", "O": "p"}}},
        "policies": {"p": policy},
    }
    assert [(each.key, each.need) for each in refused_settings(config, HostRules())] == needs
