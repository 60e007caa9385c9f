"""Which settings of a configuration name code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from broker.settings.run_code import named_code
from broker.settings.runspec import load, validate


def domain(**settings: Any) -> dict[str, Any]:
    return {"domains": {"a": settings}}


def rollout(**engine_args: Any) -> dict[str, Any]:
    return {"rollout": {"engine_args": engine_args}}


@pytest.mark.parametrize(
    ("config", "keys"),
    [
        (domain(env="my_env.py:Lake"), ["domains.a.env"]),
        (domain(env="/tmp/a b/my:env.py:Lake"), ["domains.a.env"]),
        (domain(rewards=[{"name": "exact"}, {"name": "mine.rewards:score"}]), ["domains.a.rewards.1.name"]),
        (domain(env="gymnasium", env_args={"id": "mine:Env-v0"}), ["domains.a.env_args.id"]),
        (domain(env="agent", env_args={"command": ["sh", "-c", "x"]}), ["domains.a.env_args.command"]),
        (domain(env_args={"tools": {"t": ["x.py:f"]}}), ["domains.a.env_args.tools.t.0"]),
        ({"model": {"path": "m", "trust_remote_code": True}}, ["model.trust_remote_code"]),
        ({"model": {"path": "m", "trust_remote_code": False}}, []),
        ({"rollout": {"engine": "mine:Engine"}}, ["rollout.engine"]),
        (rollout(extra={"worker_cls": "a.b.C"}), ["rollout.engine_args.extra"]),
        (rollout(extra={}, base_url="http://h:8000/v1"), []),
        (rollout(address="node1.cluster:8000"), []),
        ({"train": {"backend": "mine:Backend"}}, []),  # of the learner alone
        ({"domains": None}, []),
    ],
)
def test_keys(config: dict[str, Any], keys: list[str]) -> None:
    assert named_code(config) == keys


@pytest.mark.parametrize("preset", sorted(Path("rlearner/configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_our_own_configurations_name_none(preset: Path) -> None:
    config = load(str(preset))
    if "domains" in config and "sft" not in config:
        assert named_code(config) == (["domains.guess.env_args.command"] if preset.stem == "agent" else [])


def test_a_validated_configuration_names_what_it_named_before() -> None:
    config = validate(load("configs/quickstart.yaml", ["rollout.engine=random"]))
    assert named_code(config) == []
    config["domains"]["mine"] = {**next(iter(config["domains"].values())), "env": "mine.py:Env"}
    assert named_code(config) == ["domains.mine.env"]
