"""What a host accepts of a stranger's configuration."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from broker.contract import wire
from broker.errors import UserError
from broker.settings import runspec
from broker.settings.consent import check_consent, refused_settings
from broker.settings.host_rules import (
    HostRules,
    add_rule_options,
    enforced_rules,
    host_rules,
    parse_folder,
    parse_secret,
    rules_file,
)
from broker.settings.runspec import load, validate
from broker.settings.secret import SecretRef


def domain(**settings: Any) -> dict[str, Any]:
    return {"domains": {"a": {"env": "frozenlake", **settings}}}


def rollout(**settings: Any) -> dict[str, Any]:
    return {"rollout": settings}


def keys(config: dict[str, Any], rules: HostRules | None = None) -> list[tuple[str, str]]:
    return [(each.key, each.need) for each in refused_settings(config, rules or HostRules())]


@pytest.mark.parametrize(
    "config",
    [
        domain(env_args={"size": 8, "is_slippery": True}),
        domain(env="sokoban", isolation="sandbox", group_size=4, sampling={"temperature": 0.7}),
        domain(isolation="process"),  # stricter than its own
        domain(rewards=[{"name": "format", "args": {"pattern": "a+"}, "weight": 0.5}]),
        domain(
            rewards=[{"name": "code", "args": {"sandbox": "bubblewrap", "all_or_nothing": True}}]
        ),
        domain(length_estimator="mean", memory="recent"),
        domain(env="gymnasium", env_args={"id": "CartPole-v1", "actions": ["l", "r"]}),
        {
            "model": {
                "path": "Qwen/Qwen3-0.6B",
                "trust_remote_code": False,
                "chat_template": "plain",
            }
        },
        {"model": {"tiny": {"hidden_size": 16, "corpus": None}}},
        rollout(engine="vllm", engine_args={"tensor_parallel": 2, "extra": {}}, max_running=8),
        rollout(engine="sglang", engine_args={"command": None, "flags": {}}),
        rollout(
            engine="openai", engine_args={"base_url": "https://api.openai.com/v1", "model": "m"}
        ),
        {"envhub": {"n": 8, "pass_env": []}, "rewardhub": {"workers": 4}},
        {"train": {"backend": "mine:Backend"}},  # of the learner alone
        {"domains": None},
    ],
)
def test_harmless_settings(config: dict[str, Any]) -> None:
    assert keys(config) == []


def test_undeclared_value_needs_trust_even_without_a_colon() -> None:
    config = domain(readable=["/etc"], surprise=1) | {"envhub": {"worker_memory_mib": None}}
    assert keys(config) == [
        ("domains.a.readable", "trust"),
        ("domains.a.surprise", "trust"),
        ("envhub.worker_memory_mib", "trust"),
    ]


def test_trusted_owner_is_refused_secrets_alone() -> None:
    judge = {
        "name": "judge",
        "args": {"base_url": "https://h/v1", "api_key": {"env": "AWS_SECRET_ACCESS_KEY"}},
    }
    config = domain(env="mine.py:Env", rewards=[judge])
    refusals = refused_settings(config, HostRules(), is_trusted=True)
    assert [(each.key, each.text) for each in refusals] == [
        ("domains.a.rewards.0.args.api_key", "AWS_SECRET_ACCESS_KEY for https://h/v1")
    ]
    assert (
        refused_settings(config, HostRules.of(["AWS_SECRET_ACCESS_KEY=h"], []), is_trusted=True)
        == []
    )


@pytest.mark.parametrize(
    "preset", sorted(Path("configs").glob("*.yaml")), ids=lambda path: path.stem
)
def test_shipped_configurations(preset: Path) -> None:
    config = load(str(preset))
    if "domains" in config and "sft" not in config:
        expected = {
            "agent": [("domains.guess.env", "trust")],
            "coding_agents": [(f"domains.{name}.env", "trust") for name in config["domains"]],
            "rubric": [("domains.constraints.rewards.1.args.base_url", "endpoint")],
        }
        assert keys(config) == expected.get(preset.stem, [])


def test_secrets_of_tools_go_where_they_are_sent() -> None:
    wiki = {"url": "https://wiki.example/mcp", "headers": {"X-Key": {"env": "WIKI_KEY"}}}
    files = {"command": ["files"], "env": {"FILES": {"env": "FILES_KEY"}}}
    tools = {"wiki": {"kind": "mcp", "args": wiki}, "files": {"kind": "mcp", "args": files}}
    config = domain(env="tools", env_args={"tools": tools})
    assert ("domains.a.env", "trust") in keys(config)
    trusted = refused_settings(config, HostRules(), is_trusted=True)
    assert [(each.key, each.text) for each in trusted] == [
        (
            "domains.a.env_args.tools.wiki.args.headers.X-Key",
            "WIKI_KEY for https://wiki.example/mcp",
        ),
        ("domains.a.env_args.tools.files.args.env.FILES", "FILES_KEY for code of the run"),
    ]
    rules = HostRules.of(["WIKI_KEY=wiki.example", "FILES_KEY=*"], [])
    assert refused_settings(config, rules, is_trusted=True) == []


def test_a_retriever_and_its_key_need_its_host() -> None:
    args = {"retriever": "https://find.example", "retriever_api_key": {"env": "FIND_KEY"}}
    config = domain(env="search", env_args=args)
    assert keys(config) == [
        ("domains.a.env_args.retriever", "endpoint"),
        ("domains.a.env_args.retriever_api_key", "secret"),
    ]
    assert keys(config, HostRules.of(["FIND_KEY=find.example"], [])) == []


def test_validated_configuration_is_refused_as_before() -> None:
    config = validate(load("configs/quickstart.yaml", ["rollout.engine=random"]))
    assert keys(config) == []
    config["domains"]["mine"] = {**next(iter(config["domains"].values())), "env": "mine.py:Env"}
    assert keys(config) == [("domains.mine.env", "trust")]


def test_every_declared_field_exists() -> None:
    """A misspelt name would silently need trust; a field that names files or code is never harmless
    as it is.
    """
    from broker.settings.config import Section

    for target in runspec.SECTIONS.values():
        runspec._load_attribute(target)
    for registry in (
        "envhub.envs:ENVS",
        "rewardhub.rewards:REWARDS",
        "rollout.engines:ENGINE_ARGS",
    ):
        for place in runspec._load_attribute(registry).values():
            runspec._load_attribute(place)
    seen, waiting = [], [Section]
    while waiting:
        model = waiting.pop()
        waiting += model.__subclasses__()
        if model.__module__.startswith(
            ("broker", "envhub", "rewardhub", "rollout", "rlearner_text")
        ):
            seen.append(model)
            assert set(model.harmless or ()) <= set(model.model_fields), model
            risky = {
                "command",
                "extra",
                "flags",
                "sandbox",
                "packages",
                "make_args",
                "trust_remote_code",
                "pass_env",
            }
            assert not risky & set(model.harmless or ()), model
    assert len(seen) > 30


def test_files_are_read_below_the_folders_of_the_host(tmp_path: Path) -> None:
    inside, outside = tmp_path / "data" / "a.jsonl", tmp_path / "b.jsonl"
    inside.parent.mkdir()
    inside.touch()
    outside.touch()
    (tmp_path / "data" / "link.jsonl").symlink_to(outside)
    rules = HostRules.of([], [str(tmp_path / "data")])
    for path, allowed in (
        (inside, True),
        (outside, False),
        (tmp_path / "data" / ".." / "b.jsonl", False),
        (tmp_path / "data" / "link.jsonl", False),
        (tmp_path / "database", False),
    ):
        config = domain(env="qa", env_args={"path": str(path)})
        assert keys(config, rules) == ([] if allowed else [("domains.a.env_args.path", "data")]), (
            path
        )
        spec = wire.RunSpec(
            run="r",
            wire_version=1,
            epoch=1,
            config={},
            model_path="",
            data_digests={str(path): "0"},
        )
        if allowed:
            check_consent(spec, rules, is_trusted=False)
        else:
            with pytest.raises(UserError, match=r"names files outside .* --allow-data FOLDER"):
                check_consent(spec, rules, is_trusted=False)


@pytest.mark.parametrize(
    ("name", "url", "allowed"),
    [
        ("OPENAI_API_KEY", "https://api.openai.com/v1", True),
        ("OPENAI_API_KEY", "https://API.OpenAI.com/v1", True),
        ("OPENAI_API_KEY", "http://api.openai.com/v1", False),
        ("OPENAI_API_KEY", "http://127.0.0.1:8000/v1", True),
        ("OPENAI_API_KEY", "http://[::1]:8000/v1", True),
        ("OPENAI_API_KEY", "https://api.openai.com.evil.com/v1", False),
        ("OPENAI_API_KEY", "https://evil.com/api.openai.com", False),
        ("OPENAI_API_KEY", "", False),
        ("JUDGE_KEY", "https://judge.example.com:8443/v1", True),
        ("JUDGE_KEY", "https://other.example.com/v1", False),
        ("JUDGE_KEY", "", False),
        ("ANY_KEY", "", True),
        ("ANY_KEY", "https://h/v1", True),
        ("/run/judge", "https://h/v1", True),
        ("AWS_SECRET_ACCESS_KEY", "https://api.openai.com/v1", False),
        ("JUDGE_KEY", "https://[::1", False),
        ("JUDGE_KEY", "https://judge.example.com@evil.com/v1", False),
        ("JUDGE_KEY", "https://evil.com\\@judge.example.com/v1", False),
        ("JUDGE_KEY", "https://evil.com\t@judge.example.com/v1", False),
    ],
)
def test_secrets_go_where_the_host_says(name: str, url: str, allowed: bool) -> None:
    rules = HostRules.of(["JUDGE_KEY=judge.example.com", "ANY_KEY=*", "/run/judge=h"], [])
    assert rules.allow_secret(name, url) is allowed


def test_enforced_rules_reach_child_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    from rlearner_workers.environment import worker_environment

    monkeypatch.setenv("RL_HOST_RULES", "")
    monkeypatch.setenv("JUDGE_KEY", "abc")
    key = SecretRef(env="JUDGE_KEY")
    HostRules.of(["JUDGE_KEY=h"], ["/data"]).enforce()
    assert "RL_HOST_RULES" in worker_environment()
    assert (key.find("https://h/v1"), key.find("https://evil/v1"), key.find()) == ("abc", "", "")
    with pytest.raises(
        UserError, match=r"which this host's rules do not allow; see --allow-secret"
    ):
        key.require("args.api_key", "https://evil/v1")
    monkeypatch.setenv("RL_HOST_RULES", "damaged")
    assert enforced_rules() == HostRules()
    monkeypatch.delenv("RL_HOST_RULES")
    assert key.find("https://evil/v1") == "abc"  # on the machine of the run's owner


def test_rules_of_the_host_file_and_the_options(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    parser = argparse.ArgumentParser()
    add_rule_options(parser)
    options = parser.parse_args(["--allow-secret", "A=x", "--allow-data", "/data/one"])
    assert host_rules(options) == HostRules({"A": frozenset({"x"})}, ("/data/one",))
    file = rules_file()
    file.parent.mkdir()
    file.write_text('allow-secret = ["A=y", "B=*"]\nallow-data = ["/data/two"]\n')
    file.chmod(0o600)
    expected = HostRules(
        {"A": frozenset({"x", "y"}), "B": frozenset({"*"})}, ("/data/two", "/data/one")
    )
    assert host_rules(options) == expected
    for text, problem in (
        ("allow-secret = 'A=y'", "allow-secret must be a list of texts"),
        ("allow-data = ['/']", "'/' is not allowed; an absolute folder, for example /data"),
        ("allow-dat = []", "allow-dat is not allowed; known: allow-secret, allow-data"),
        ("x", "not valid TOML"),
    ):
        file.write_text(text)
        with pytest.raises(UserError, match=problem):
            host_rules(options)
    file.chmod(0o620)
    with pytest.raises(UserError, match="could be written by other users; run chmod go-w"):
        host_rules(options)


@pytest.mark.parametrize("text", ["A", "A=", "=h", "A=https://h/v1", "A=a b"])
def test_malformed_secret_rules(text: str) -> None:
    with pytest.raises(ValueError, match="NAME=HOST"):
        parse_secret(text)


@pytest.mark.parametrize("text", ["data", "/", "/x/..", ""])
def test_malformed_folders(text: str) -> None:
    with pytest.raises(ValueError, match="an absolute folder"):
        parse_folder(text)
