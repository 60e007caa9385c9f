"""Logs are rotated by their writers, and lose no line."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from broker.server.private_server import BrokerServer
from broker.system.log_rotation import MAX_OLD_FILES, PrivateLogFile, limit_bytes

ROOT = Path(__file__).parents[3]
WRITES = """
import logging, os, subprocess, sys
from broker.system import logs
logs.configure()
for number in range(400):
    logging.getLogger("w").info("line %04d %s", number, "x" * 100)
    if number % 50 == 0:
        print(f"printed {number:04d}", flush=True)
        subprocess.run([sys.executable, "-c", f"print('child {number:04d}')"], check=True)
"""


def everything(path: Path) -> str:
    older = [path.with_name(f"{path.name}.{number}") for number in range(MAX_OLD_FILES, 0, -1)]
    return "".join(file.read_text() for file in (*older, path) if file.exists())


def run(path: Path, mib: str, **more: str) -> None:
    environment = {**os.environ, "RL_LOG_OUTPUT": str(path), "RL_LOG_MIB": mib, **more}
    with path.open("ab") as out:
        subprocess.run(
            [sys.executable, "-c", WRITES],
            stdout=out,
            stderr=out,
            check=True,
            env=environment,
            cwd=ROOT,
        )


def test_the_output_of_a_process_is_rotated_without_losing_a_line(tmp_path: Path) -> None:
    path = tmp_path / "hub.log"
    path.touch(0o600)
    run(path, "0.02")  # 21 kB, of 60 kB in all
    text = everything(path)
    assert re.findall(r"line (\d{4})", text) == [f"{number:04d}" for number in range(400)]
    for kind in ("printed", "child"):
        assert re.findall(rf"{kind} (\d{{4}})", text) == [
            f"{number:04d}" for number in range(0, 400, 50)
        ]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["hub.log", "hub.log.1", "hub.log.2"]
    assert {file.stat().st_mode & 0o777 for file in tmp_path.iterdir()} == {0o600}
    assert all(file.stat().st_size < 23_000 for file in tmp_path.iterdir())


def test_only_some_older_files_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "hub.log"
    run(path, "0.005")
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "hub.log",
        *(f"hub.log.{n}" for n in range(1, MAX_OLD_FILES + 1)),
    ]
    assert "line 0399" in everything(path)


@pytest.mark.parametrize("other", ["missing", "elsewhere"])
def test_a_file_that_is_not_its_output_is_left_alone(tmp_path: Path, other: str) -> None:
    path, named = tmp_path / "mine.log", tmp_path / "other.log"
    if other == "elsewhere":
        named.write_text("theirs")
    run(path, "0.005", RL_LOG_OUTPUT=str(named))
    assert len(re.findall(r"line \d{4}", path.read_text())) == 400
    assert named.exists() == (other == "elsewhere")
    assert not path.with_name("mine.log.1").exists()


def test_a_log_file_is_private_and_rotated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import logging

    monkeypatch.setenv("RL_LOG_MIB", "0.001")
    path = tmp_path / "a.log"
    path.touch(0o644)
    handler = PrivateLogFile(str(path))
    for number in range(30):
        handler.handle(logging.makeLogRecord({"msg": f"line {number:04d} {'x' * 60}"}))
    handler.close()
    assert re.findall(r"line (\d{4})", everything(path)) == [
        f"{number:04d}" for number in range(30)
    ]
    assert path.with_name("a.log.1").stat().st_mode & 0o777 == 0o600


def test_two_processes_with_one_file_lose_no_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import logging

    monkeypatch.setenv("RL_LOG_MIB", "0.001")
    path = tmp_path / "a.log"
    first, second = PrivateLogFile(str(path)), PrivateLogFile(str(path))
    for number in range(55):
        handler = (first, second)[number % 2]
        handler.handle(logging.makeLogRecord({"msg": f"line {number:04d} {'x' * 60}"}))
    first.close()
    second.close()
    assert sorted(re.findall(r"line (\d{4})", everything(path))) == [
        f"{number:04d}" for number in range(55)
    ]
    # 55 lines of 71 bytes fill four files; rotated twice, the first would be gone
    assert path.stat().st_size > 500


@pytest.mark.parametrize(
    ("given", "expected"), [("", 64 << 20), ("1", 1 << 20), ("-3", 64 << 20), ("many", 64 << 20)]
)
def test_the_size_comes_from_the_environment(
    given: str, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RL_LOG_MIB", given)
    assert limit_bytes() == expected


def test_the_log_of_a_private_server_is_rotated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RL_LOG_MIB", "0.002")
    server = BrokerServer(str(tmp_path / "store"))
    for _ in range(6):
        server.start()
        server.stop()
    logs = sorted((tmp_path / "store").glob("nats-server.log*"))
    assert 2 <= len(logs) <= MAX_OLD_FILES + 1
    assert all(log.stat().st_size < 8192 for log in logs)
    assert {log.stat().st_mode & 0o077 for log in logs} == {0}
