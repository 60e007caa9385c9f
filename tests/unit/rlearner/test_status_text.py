"""What ``rlearner status`` prints: one screen, at any width."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
import yaml

from broker.errors import UserError
from broker.settings.run_address import UP_LOCK
from broker.system.locks import lock
from learner.run_folder import OFFLINE_LOCK, UNKNOWN, find_run, note_broker
from rlearner.cli import make_parser
from rlearner.ops.status import missing_learner_lines, show_status, wrap_lines
from rlearner.up.run_claim import RunClaim


def test_what_does_not_fit_goes_below_the_second_column() -> None:
    line = "  figures      reward/mean 0.3457, env/success_rate 0.5, staleness/max 2"
    assert wrap_lines([line], 80) == [line]
    assert wrap_lines([line], 50) == [
        "  figures      reward/mean 0.3457,",
        "               env/success_rate 0.5, staleness/max",
        "               2",
    ]


def test_an_id_or_a_path_is_never_broken() -> None:
    path = "/a/very-long/path/" + "x" * 60
    assert wrap_lines([f"  warning      see {path}"], 40) == [
        "  warning      see",
        f"               {path}",
    ]


def test_a_finished_run_is_not_said_to_be_started_again() -> None:
    """Its private broker has ended with it."""
    finished = {
        "folder": "/runs/a",
        "step": 40,
        "steps": 40,
        "broker": None,
        "broker_error": "no broker answered",
    }
    assert missing_learner_lines(finished) == ["no learner is running: all 40 steps are done"]
    assert missing_learner_lines({**finished, "step": 39})[0].endswith(
        "continues the run where it stopped"
    )


@pytest.mark.parametrize("is_private", [False, True])
def test_a_broker_without_the_run_is_no_reason_to_rebase(tmp_path: Path, is_private: bool) -> None:
    """It may be another run's broker, or that of another time at the same address."""
    url = "nats://10.0.0.1:4222"
    note_broker(tmp_path, url)
    (tmp_path / UP_LOCK).write_text(f"1\n{url}\n" if is_private else "")
    status = {
        "folder": str(tmp_path),
        "step": 3,
        "steps": 40,
        "broker": None,
        "broker_error": f"the broker at {url} {UNKNOWN} a",
    }
    (line,) = missing_learner_lines(status)
    file = os.path.relpath(tmp_path / "config.yaml")
    command = f"`rlearner start {file} --broker {url}` continues the run with its broker"
    if is_private:
        command = f"`rlearner up {file}` continues the run where it stopped"
    assert command in line
    assert "rebase" not in line
    with RunClaim(tmp_path, "a"):
        assert missing_learner_lines(status) == [
            "no learner is running yet: `rlearner up` starts it"
        ]


def test_status_without_a_name_takes_the_newest_run(tmp_path: Path) -> None:
    options = make_parser().parse_args(["status", "--dir", str(tmp_path)])
    with pytest.raises(UserError, match=f"no run below {tmp_path}"):
        find_run(options.run_name, options.dir)
    for name, at in (("old", 10), ("trained", 20), ("new", 30)):
        (tmp_path / name).mkdir()
        file = tmp_path / name / "config.yaml"
        file.write_text(f"run: {{name: {name}}}\n")
        os.utime(file, (at, at))
    assert find_run(options.run_name, options.dir).name == "new"
    metrics = tmp_path / "trained" / "metrics.jsonl"
    metrics.touch()
    os.utime(metrics, (40, 40))
    assert find_run(options.run_name, options.dir).name == "trained"
    assert make_parser().parse_args(["status", "old"]).run_name == "old"


@pytest.mark.parametrize("kind", ["sft", "dpo", "evaluation"])
def test_status_of_a_folder_without_a_fleet(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It asks no broker and names the command that continues the run."""
    folder = tmp_path / "a"
    folder.mkdir()
    sections = {"sft": {"data": {}}, "dpo": {"data": {}, "dpo": {}}, "evaluation": {"domains": {}}}
    config = {"run": {"name": "a"}, "train": {"steps": 4}} | sections[kind]
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    (folder / "metrics.jsonl").write_text('{"step": 3, "train/loss": 0.5, "eval/loss": 0.75}\n')
    if kind == "evaluation":
        (folder / "result.json").touch()
    options = make_parser().parse_args(["status", "a", "--dir", str(tmp_path)])
    assert asyncio.run(show_status(options)) == 0
    lines = capsys.readouterr().out.splitlines()
    if kind == "evaluation":
        result = os.path.relpath(folder / "result.json")
        assert lines == [f"run a: an evaluation, which is over; its result is in {result}"]
        return
    file = os.path.relpath(folder / "config.yaml")
    assert lines == [
        f"nothing trains it: `rlearner {kind} {file}` continues the run where it stopped",
        "run a: step 3 of 4",
        "  figures      train/loss 0.5, eval/loss 0.75",
        "  checkpoints  none yet",
    ]
    with lock(folder / OFFLINE_LOCK, "held"):
        assert asyncio.run(show_status(options)) == 0
    assert capsys.readouterr().out.startswith("run a: step 3 of 4\n")
