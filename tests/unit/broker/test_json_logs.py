"""Logs as JSON: one object per line, nothing secret in it, for the log file too."""

from __future__ import annotations

import argparse
import json
import logging
import os
from pathlib import Path

import pytest

from broker.settings.arguments import ArgumentParser
from broker.system import logs

KEY = "sk-abcdefghijklmnopqrstuvwx"


@pytest.fixture(autouse=True)
def process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("run", "quick"), ("role", "envhub"), ("id", "envhub-1")):
        monkeypatch.setitem(logs._identity, name, value)
    monkeypatch.setenv(logs.FORMAT, "text")  # restored afterwards: `apply` sets it
    logs.configure()


def options(*words: str) -> argparse.Namespace:
    parser = ArgumentParser(prog="hub")
    logs.add_options(parser)
    return parser.parse_args(words)


def test_a_record_is_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    logs.apply(options("--log-format", "json"))
    record = logging.getLogger("hub").makeRecord(
        "hub", logging.INFO, __file__, 1, "took\n%d \x1b[31m", (3,), None
    )
    record.created = 1795612801.0425
    record.step, record.share, record.what = 7, float("nan"), "a 'b'"
    logging.getLogger().handle(record)
    written = capsys.readouterr().err
    assert written.count("\n") == 1
    assert json.loads(written) == {
        "time": "2026-11-25T13:20:01.042Z",
        "level": "INFO",
        "run": "quick",
        "role": "envhub",
        "id": "envhub-1",
        "message": "took\n3 \x1b[31m",
        "extra": {"step": 7, "share": "nan", "what": "a 'b'"},
    }
    assert "\x1b" not in written


def test_a_traceback_has_a_field_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    logs.apply(options("--log-format", "json"))
    try:
        raise KeyError("lake")
    except KeyError:
        logging.getLogger("hub").exception("it failed")
    logging.getLogger("hub").warning("a worker failed", extra={"traceback": "File x.py, line 3"})
    first, second = map(json.loads, capsys.readouterr().err.splitlines())
    assert (first["level"], first["message"]) == ("ERROR", "it failed")
    assert first["traceback"].endswith("KeyError: 'lake'")
    assert "extra" not in first
    assert second["traceback"] == "File x.py, line 3"


def test_secrets_are_hidden_and_the_line_stays_json(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", 'quo"te\\d-secret')
    logs.apply(options("--log-format", "json"))
    said = f'token {KEY}, api_key=abc\\" and quo"te\\d-secret'
    logging.getLogger("hub").warning(
        said, extra={"api_key": "hunter2", "url": "nats://me:pw@host:1", "traceback": KEY}
    )
    line = json.loads(capsys.readouterr().err)
    assert line["message"] == 'token ***, api_key=***" and ***'
    assert line["extra"] == {"api_key": "***", "url": "nats://***@host:1"}
    assert line["traceback"] == "***"


def test_the_log_file_and_a_refusal_have_the_same_format(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "hub.log"
    logs.apply(options("--log-format", "json", "--log-file", str(file)))
    logging.getLogger("hub").info("joined")
    logs.say_error("--run: no such run")
    assert [json.loads(line)["message"] for line in file.read_text().splitlines()] == [
        "joined",
        "--run: no such run",
    ]
    last = capsys.readouterr().err.splitlines()[-1]
    assert json.loads(last)["message"] == "error: --run: no such run"
    assert logs.error_of(last) == "--run: no such run"
    logging.getLogger().handlers[-1].close()
    assert logs.error_of("error: port 1 is taken") == "port 1 is taken"
    assert (
        logs.error_of('{"message": "joined"}')
        == logs.error_of("{broken")
        == logs.error_of("[1]")
        == ""
    )


def test_children_inherit_the_format(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    logs.apply(options("--log-format", "json"))
    assert os.environ[logs.FORMAT] == "json"
    assert options().log_format == "json"
    monkeypatch.setenv(logs.FORMAT, "xml")
    assert options().log_format == "text"


def test_a_wrong_format_is_refused_in_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        options("--log-format", "xml")
    assert ended.value.code == 2
    assert "argument --log-format: invalid choice: 'xml'" in capfd.readouterr().err
