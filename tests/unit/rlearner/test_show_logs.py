"""``rlearner logs``: entries of several processes by time, followed across rotations and restarts."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from broker.system import logs
from broker.system.log_rotation import rotate
from rlearner.cli import main
from rlearner.ops.log_files import LogEntry, LogFile, LogParser, parse_since

DAY = "2026-11-25"


def line(at: str, level: str, message: str) -> str:
    return f"{DAY} {at} {level} r envhub envhub-1 {message}"


def write(path: Path, *lines: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write("".join(f"{one}\n" for one in lines))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "r"
    folder.mkdir()
    (folder / "config.yaml").write_text(
        yaml.safe_dump({"run": {"name": "r"}, "train": {"steps": 3}})
    )
    write(
        folder / "logs" / "envhub.log.1",
        line("12:00:01.000", "INFO", "first"),
        line("12:00:03.500", "ERROR", "an environment broke env=lake"),
        "Traceback (most recent call last):",
        "  ValueError: no ice",
    )
    write(folder / "logs" / "envhub.log", line("12:00:06.000", "WARNING", "slow"))
    write(
        folder / "logs" / "learner.log",
        "a library prints this before any log",
        f"{DAY} 12:00:02.000 INFO r learner learner step 1 of 3 reward=0.5",
        f"{DAY} 12:00:05.000 DEBUG r learner learner details",
        "error: broker.url: the store is lost",
    )
    write(
        folder / "broker" / "nats-server.log",
        f"[7] {DAY.replace('-', '/')} 12:00:04.250000 [WRN] slow disk",
    )
    return folder


def shown(run: Path, *options: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    assert main(["logs", str(run), *options]) == 0
    return capsys.readouterr().out.splitlines()


def test_all_logs_are_one_list_by_time(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(run, capsys=capsys) == [
        f"{'':23} INFO    learner        a library prints this before any log",
        f"{DAY} 12:00:01.000 INFO    envhub         first",
        f"{DAY} 12:00:02.000 INFO    learner        step 1 of 3 reward=0.5",
        f"{DAY} 12:00:03.500 ERROR   envhub         an environment broke env=lake",
        "Traceback (most recent call last):",
        "  ValueError: no ice",
        f"{DAY} 12:00:04.250 WARNING broker         slow disk",
        f"{DAY} 12:00:05.000 DEBUG   learner        details",
        f"{DAY} 12:00:05.000 ERROR   learner        error: broker.url: the store is lost",
        f"{DAY} 12:00:06.000 WARNING envhub         slow",
    ]


def test_a_role_a_level_a_time_and_a_number_select(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def messages(*options: str) -> list[str]:
        return [json.loads(one)["message"] for one in shown(run, *options, "--json", capsys=capsys)]

    assert messages("learner", "broker", "--level", "warning") == [
        "slow disk",
        "error: broker.url: the store is lost",
    ]
    assert messages("--since", f"{DAY} 12:00:05") == [
        "details",
        "error: broker.url: the store is lost",
        "slow",
    ]
    assert messages("-n", "2") == ["error: broker.url: the store is lost", "slow"]
    (fault,) = (
        json.loads(one) for one in shown(run, "envhub", "--level", "error", "--json", capsys=capsys)
    )
    moment = datetime.fromisoformat(f"{DAY} 12:00:03.500").timestamp()
    assert datetime.fromisoformat(fault.pop("time")).timestamp() == moment
    assert fault == {
        "level": "ERROR", "process": "envhub", "run": "r", "role": "envhub", "id": "envhub-1",
        "message": "an environment broke env=lake",
        "below": ["Traceback (most recent call last):", "  ValueError: no ice"],
    }  # fmt: skip


def test_records_that_were_written_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the formatter writes is what the parser reads."""
    monkeypatch.setattr(logs, "_identity", {"run": "r", "role": "learner", "id": "learner-1"})
    record = logging.makeLogRecord(
        {"msg": "step 2", "levelname": "WARNING", "created": 1764072000.25, "reward": 0.5}
    )
    (entry,) = LogParser("learner").parse([logs.JsonFormatter().format(record)])
    assert entry == LogEntry(
        1764072000.25, "WARNING", "learner", "step 2 reward=0.5", "r", "learner", "learner-1"
    )
    (broken,) = LogParser("learner").parse(['{"time": "soon"'])
    assert (broken.time, broken.level, broken.message) == (0.0, "INFO", '{"time": "soon"')


def test_control_characters_of_a_log_do_not_reach_the_terminal(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(
        run / "logs" / "rewardhub.log",
        line("12:00:07.000", "INFO", "red \x1b[31m"),
        "\x1b]0;title\x07",
    )
    assert shown(run, "rewardhub", capsys=capsys)[0].endswith("red \\x1b[31m")
    assert "\x1b" not in "".join(shown(run, "rewardhub", "--json", capsys=capsys))


def test_an_unknown_role_is_told_which_there_are(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(
            [
                "logs",
                str(run),
                "rollout",
                "--broker",
                "nats://127.0.0.1:9",
                "--connect-deadline",
                "0.2",
            ]
        )
        == 2
    )
    assert "no broker answered" in capsys.readouterr().err
    assert main(["logs", str(run), "rollout", "--connect-deadline", "0.2"]) == 2
    said = capsys.readouterr().err
    there = f"run r has logs of broker, envhub, learner in {run / 'logs'}, not of rollout; on its broker: "
    assert said.startswith(f"error: {there}")


@pytest.mark.parametrize(
    ("text", "seconds_ago"),
    [("90s", 90), ("10m", 600), ("2h", 7200), ("1d", 86_400)],
)
def test_times_as_users_write_them(text: str, seconds_ago: int) -> None:
    assert time.time() - parse_since(text) == pytest.approx(seconds_ago, abs=2.5)


def test_a_time_is_of_today() -> None:
    assert datetime.fromtimestamp(parse_since("9:05")) == datetime.now().replace(
        hour=9, minute=5, second=0, microsecond=0
    )


@pytest.mark.parametrize("text", ["soon", "10", "10 m", "25:00", "2026-13-01"])
def test_times_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match="is not allowed; how long ago"):
        parse_since(text)


def test_two_rotations_between_two_looks_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "envhub.log"
    write(path, line("12:00:00.000", "INFO", "old"))
    log = LogFile(path, "envhub")
    assert [entry.message for entry in log.entries()] == ["old"]
    for number in range(3):
        write(path, line(f"12:00:0{number}.000", "INFO", f"before {number}"))
        if number < 2:
            rotate(str(path))
    assert [entry.message for entry in log.news()] == ["before 0", "before 1", "before 2"]
    with path.open("a") as file:  # a line in two writes
        file.write(line("12:00:04.000", "INFO", "ha"))
        file.flush()
        assert log.news() == []
        file.write("lf\n")
    assert [entry.message for entry in log.news()] == ["half"]
    path.write_text(f"{line('12:00:05.000', 'INFO', 'again')}\n")  # emptied
    assert [entry.message for entry in log.news()] == ["again"]
    log.close()


def test_a_last_line_without_end_is_not_joined_to_the_next_file(tmp_path: Path) -> None:
    path = tmp_path / "envhub.log"
    write(path, line("12:00:00.000", "INFO", "old"))
    log = LogFile(path, "envhub")
    assert [entry.message for entry in log.entries()] == ["old"]
    with path.open("a") as file:
        file.write(line("12:00:01.000", "INFO", "killed here"))
    assert log.news() == []
    rotate(str(path))
    write(path, line("12:00:02.000", "INFO", "next life"))
    assert [entry.message for entry in log.news()] == ["killed here", "next life"]
    log.close()


def test_following_shows_new_lines_new_processes_and_restarts(run: Path) -> None:
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "rlearner.cli", "logs", str(run), "-f", "-n", "1", "--json"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as child:
        assert child.stdout is not None

        def reads() -> dict[str, Any]:
            assert child.stdout is not None
            found = json.loads(child.stdout.readline())
            return {name: found[name] for name in ("process", "message")}

        try:
            assert reads() == {"process": "envhub", "message": "slow"}
            write(run / "logs" / "learner.log", line("12:01:00.000", "INFO", "step 2 of 3"))
            assert reads() == {"process": "learner", "message": "step 2 of 3"}
            write(run / "logs" / "rewardhub.log", line("12:01:01.000", "INFO", "joined"))
            assert reads() == {"process": "rewardhub", "message": "joined"}
            rotate(str(run / "logs" / "learner.log"))
            write(run / "logs" / "learner.log", line("12:01:02.000", "INFO", "started again"))
            assert reads() == {"process": "learner", "message": "started again"}
        finally:
            child.send_signal(2)
            _, errors = child.communicate(timeout=60)
    assert (child.returncode, errors) == (130, "")
