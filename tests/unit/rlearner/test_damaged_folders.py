"""Commands on a run's folder that is damaged: one line and exit code 2, or what can still be read."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from learner.reporting.metrics import damaged_line, read_lines
from rlearner.cli import main

JUNK = bytes(range(128, 200))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "r"
    folder.mkdir()
    (folder / "config.yaml").write_text("run: {name: r}\ntrain: {steps: 3}\n")
    return folder


@pytest.mark.parametrize(
    "command", [["logs"], ["audit"], ["draw"], ["status"], ["console", "--port", "0"]]
)
@pytest.mark.parametrize(
    ("content", "said"),
    [
        (
            JUNK,
            "cannot be read: 'utf-8' codec can't decode byte 0x80 in position 0: invalid start byte",
        ),
        (b"run: [", "cannot be read: while parsing a flow node"),
        (b"", "does not hold the settings of a run; expected run.name"),
        (b"run: 3", "does not hold the settings of a run; expected run.name"),
    ],
)
def test_settings(
    run: Path, command: list[str], content: bytes, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "config.yaml").write_bytes(content)
    assert main([command[0], str(run), *command[1:]]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {run / 'config.yaml'}: {said}")
    assert error.count("\n") == 1


def test_a_folder_without_settings_is_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "config.yaml").unlink()
    assert main(["audit", str(run)]) == 2
    assert (
        capsys.readouterr().err
        == f"error: {run}: has no config.yaml, so it is not the folder of a run\n"
    )


def test_one_bad_run_does_not_hide_the_list(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run.parent / "folder" / "config.yaml").mkdir(parents=True)
    (run.parent / "junk").mkdir()
    (run.parent / "junk" / "config.yaml").write_bytes(JUNK)
    assert main(["runs", str(run.parent), "--json"]) == 0
    states = {one["name"]: one["state"] for one in json.loads(capsys.readouterr().out)["runs"]}
    assert states == {"folder": "unreadable", "junk": "unreadable", "r": "stopped"}


@pytest.mark.parametrize("bad", [JUNK, b"[1, 2]", b"3", b'{"step": '])
def test_lines_are_read_up_to_the_first_that_is_not_an_object(tmp_path: Path, bad: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n' + bad + b'\n{"step": 4}\n')
    assert read_lines(path) == [{"step": 1}, {"step": 2}]
    assert damaged_line(path) == 3


def test_a_line_that_is_being_written_is_not_damaged(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"st')
    assert damaged_line(path) == 0
    assert damaged_line(tmp_path / "none.jsonl") == 0


def test_checkpoint_of_a_run_that_has_ended(run: Path) -> None:
    command = [sys.executable, "-m", "rlearner.cli", "checkpoint-now", str(run)]
    command += ["--broker", "nats://127.0.0.1:1", "--connect-deadline", "0.1"]

    def said() -> str:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (2, "")
        return done.stderr.splitlines()[-1]

    (run / "metrics.jsonl").write_bytes(b'{"step": 2}\n')
    assert "127.0.0.1:1" in said()
    (run / "metrics.jsonl").write_bytes(b'{"step": 2}\n{"step": 3}\n')
    assert said() == "error: run r ended after its last step, 3, and wrote a checkpoint of it"
