"""What counts as a secret, and what is left of a text without its secrets."""

from __future__ import annotations

import io
import logging
import os
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.errors import ConfigError
from broker.system import fault, logs
from broker.system.redaction import is_secret_name, redact, why_secret, without_secrets

SEED = "SUAMK2FG4MI6UE3ACF3FK3OIQBCEIEZV7NSWFFEW63UXMRLFM2XLAXK4GY"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"key {SEED} refused", "key *** refused"),
        ("sent sk-proj-abcdefghijklmnopqrstuvwx.", "sent ***."),
        ("hf_" + "a1" * 17, "***"),
        ("nats://ann:pass@10.0.0.1:4222,nats://b:4222", "nats://***@10.0.0.1:4222,nats://b:4222"),
        ("GET https://api.host/v1?api_key=abc123&n=2", "GET https://api.host/v1?api_key=***&n=2"),
        ('{"password": "two words", "user": "ann"}', '{"password": "***", "user": "ann"}'),
        ("Authorization: Bearer abc.def", "Authorization: Bearer ***"),
        ("a.b.api_key: 'abc' is not allowed", "a.b.api_key: '***' is not allowed"),
        ("-----BEGIN PRIVATE KEY-----\nMIIE\n-----END PRIVATE KEY-----\nthen", "***\nthen"),
        (
            "max_tokens=256 token=5 eos_token: '<e>' keys: 3",
            "max_tokens=256 token=5 eos_token: '<e>' keys: 3",
        ),
        (
            "api_key needs the variable JUDGE_KEY, not set",
            "api_key needs the variable JUDGE_KEY, not set",
        ),
    ],
)
def test_secrets_are_found_by_format_name_or_login(text: str, expected: str) -> None:
    assert redact(text, {}) == expected
    assert redact(expected, {}) == expected


def test_values_of_variables_with_names_of_secrets_are_found() -> None:
    environ = {
        "JUDGE_KEY": "plain words",
        "WANDB_API_KEY": "plain words too",
        "A_TOKEN": "short",
        "TLS_KEY": "/etc/tls.pem",
    }
    said = redact("plain words, plain words too, short, /etc/tls.pem", environ)
    assert said == "***, ***, short, /etc/tls.pem"


def test_names_of_secrets() -> None:
    secret = [
        "api_key",
        "OPENAI_API_KEY",
        "password",
        "hf_token",
        "client_secret",
        "aws_secret_access_key",
        "token",
    ]
    plain = [
        "key",
        "eos_token",
        "max_tokens",
        "tokenizer",
        "api_key_env",
        "secret_word",
        "score_pattern",
        "monkey",
    ]
    assert [name for name in (*secret, *plain) if is_secret_name(name)] == secret


def test_literal_secrets_are_recognized() -> None:
    assert why_secret("api_key", "x") == "it is a secret by its name"
    assert why_secret("prompt", SEED) == "it has the format of a secret"
    assert why_secret("url", "http://u:p@host/") == "it is an address with a login"
    assert why_secret("url", "http://host/a@b") == ""
    assert why_secret("api_key", "") == ""


def test_a_child_without_need_gets_no_secrets() -> None:
    environ = {
        "PATH": "/bin",
        "HF_TOKEN": "x",
        "RL_API_KEY": "y",
        "RL_BROKER": "nats://u:p@h",
        "HOME": "/root",
    }
    assert without_secrets(environ) == {"PATH": "/bin", "HOME": "/root"}


def test_log_lines_errors_and_tracebacks_hide_secrets(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MY_KEY", "very secret value")
    record = logging.LogRecord("x", logging.INFO, "f.py", 1, "got %s", ("very secret value",), None)
    record.answer = "very secret value"
    record.traceback = "  boom very secret value"
    assert logs.LineFormatter().format(record).count("***") == 3
    logs.say_error(str(ConfigError("rewards.0.args.api_key", "abc", "write a reference")))
    assert (
        capsys.readouterr().err
        == "error: rewards.0.args.api_key: '***' is not allowed; write a reference\n"
    )
    with pytest.raises(ValueError) as raised:
        raise ValueError(os.environ["MY_KEY"])
    assert fault.told(raised.value).startswith("ValueError: ***")
    assert "very secret value" not in fault.trace(raised.value)


@given(st.text())
def test_text_without_secrets_stays(text: str) -> None:
    assert redact(
        f"step {text.replace('=', '').replace(':', '').replace('bearer', '')[:40]}", {}
    ).startswith("step ")


@pytest.mark.parametrize(
    "unit",
    [
        "a_",
        "://",
        "http://",
        "sk-",
        "api_key",
        "-----BEGIN PRIVATE KEY-----",
        "eyJaaaaaaaaaaa.",
        "bearer ",
    ],
)
def test_hostile_text_costs_little_time(unit: str) -> None:
    text = unit * (100_000 // len(unit))
    began = time.process_time()
    redact(text, {})
    assert time.process_time() - began < 2


def test_a_file_of_the_log_hides_them_too(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    handler = logging.StreamHandler(out)
    handler.setFormatter(logs.LineFormatter())
    handler.handle(logging.LogRecord("x", logging.INFO, "f.py", 1, "nats://u:p@h", (), None))
    assert out.getvalue().endswith(" nats://***@h\n")
