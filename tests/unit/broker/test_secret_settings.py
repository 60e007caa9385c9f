"""References to secrets in configurations, and literals that are refused."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from broker.errors import ConfigError, UserError
from broker.settings.config import Section
from broker.settings.config_file import load
from broker.settings.runspec import validate
from broker.settings.secret import SecretRef, resolved
from broker.settings.sections import parse


class _Args(Section):
    api_key: SecretRef = SecretRef(env="SOME_KEY")


def test_a_variable_is_read_where_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    ref = parse("args", {"api_key": {"env": "MY_KEY"}}, _Args).api_key
    monkeypatch.delenv("MY_KEY", raising=False)
    assert ref.find() == ""
    with pytest.raises(
        UserError, match=r"^args\.api_key needs the environment variable MY_KEY, which is not set$"
    ):
        ref.require("args.api_key")
    monkeypatch.setenv("MY_KEY", " abc\n")
    assert ref.require("args.api_key") == "abc"
    monkeypatch.setenv("MY_KEY", "a\nb")
    with pytest.raises(
        UserError, match=r"^the environment variable MY_KEY must hold one line of text$"
    ):
        ref.find()


def test_a_file_must_be_private_small_and_there(tmp_path: Path) -> None:
    path = tmp_path / "key"
    ref = SecretRef(file=str(path))
    with pytest.raises(UserError, match=rf"^k needs the file {path}, which is missing or empty$"):
        ref.require("k")
    path.write_text("abc\n")
    path.chmod(0o644)
    with pytest.raises(
        UserError, match=rf"^the file {path} must not be open to other users; run chmod o= {path}$"
    ):
        ref.require("k")
    path.chmod(0o600)
    assert ref.require("k") == "abc"
    path.write_bytes(b"x" * 70_000)
    with pytest.raises(UserError, match=r"is larger than 65536 bytes$"):
        ref.require("k")


@pytest.mark.parametrize(
    "value", ["sk-abc", {}, {"env": "A", "file": "b"}, {"env": "A B"}, {"env": "$(id)"}, 5]
)
def test_anything_but_one_reference_is_refused_without_its_value(value: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"^args\.api_key: '\*\*\*' is not allowed; write \{env: NAME\} or"
    ):
        parse("args", {"api_key": value}, _Args)


def _config(**args: Any) -> dict[str, Any]:
    return {"domains": {"d": {"env": "frozenlake", "rewards": [{"name": "judge", "args": args}]}}}


@pytest.mark.parametrize(
    ("args", "key"),
    [
        ({"api_key": "verysecret"}, "api_key"),
        ({"base_url": "http://ann:verysecret@host/v1"}, "base_url"),
        (
            {"extra_body": {"headers": ["x", {"password": "verysecret"}]}},
            "extra_body.headers.1.password",
        ),
        ({"template": "hf_" + "verysecret" * 4}, "template"),
    ],
)
def test_a_secret_in_a_configuration_is_refused_unseen(args: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as refused:
        validate(_config(**args))
    assert str(refused.value).startswith(
        f"domains.d.rewards.0.args.{key}: '***' is not allowed; it "
    )
    assert str(refused.value).endswith(
        "write {env: NAME} or {file: PATH}, which say where the secret is"
    )


def test_an_interpolation_copies_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "verysecret")
    monkeypatch.setenv("PLAIN", "verysecret")
    file = tmp_path / "run.yaml"
    for text, allowed in (
        ("run: {name: '${oc.env:WANDB_API_KEY}'}", False),
        ("x: {api_key: '${ oc.env: PLAIN }'}", False),
        ("run: {name: '${oc.env:PLAIN}'}", True),
    ):
        file.write_text(text)
        if allowed:
            assert load(str(file)) == {"run": {"name": "verysecret"}}
        else:
            with pytest.raises(
                UserError, match=r"would store a secret with the run; write \{env: "
            ) as refused:
                load(str(file))
            assert "verysecret" not in str(refused.value)


def test_arguments_of_a_function_get_the_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "abc")
    given = {
        "n": 3,
        "deep": [{"api_key": {"env": "MY_KEY"}}],
        "env": {"env": "CartPole"},
        "token": {"a": 1, "b": 2},
    }
    expected = {
        "n": 3,
        "deep": [{"api_key": "abc"}],
        "env": {"env": "CartPole"},
        "token": {"a": 1, "b": 2},
    }
    assert resolved(given, "args") == expected
    monkeypatch.delenv("MY_KEY")
    with pytest.raises(
        UserError, match=r"^args\.deep\.0\.api_key needs the environment variable MY_KEY"
    ):
        resolved(given, "args")


def test_the_names_of_files_expand_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "key").write_text("abc")
    os.chmod(tmp_path / "key", 0o600)
    assert SecretRef(file="~/key").find() == "abc"
