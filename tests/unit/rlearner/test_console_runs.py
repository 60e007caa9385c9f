"""The list of runs: read off the event loop and once, and no broker that does not answer holds it
up.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import run_folder_kit as kit
import yaml
from waits import until

from learner.run_folder import note_broker
from rlearner.console.index import runs
from rlearner.console.index.runs import RunList, setting_differences


def made(root: Path, name: str, **settings: Any) -> Path:
    folder = root / name
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(
        yaml.safe_dump({"run": {"name": name}, "train": {"steps": 9}} | settings)
    )
    return folder


async def test_runs_are_listed_with_their_newest_figures(tmp_path: Path) -> None:
    run = tmp_path / "run"
    await kit.World(run).learn()
    other = run.with_name("other")
    other.mkdir()
    (other / "config.yaml").write_text("run: [")
    runs = RunList(run.parent)
    rows = {row.name: row for row in await runs.rows(wait_s=20.0)}
    await runs.close()
    assert (rows["run"].state, rows["run"].step, rows["run"].steps) == (
        "finished",
        kit.STEPS,
        kit.STEPS,
    )
    assert rows["run"].last == {
        "staleness/max": json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])[
            "staleness/max"
        ]
    }
    assert rows["other"].state == "unreadable"


def test_settings_that_differ_are_named(tmp_path: Path) -> None:
    settings = {
        "a": {"run": {"name": "a"}, "train": {"lr": 1.0, "steps": 5}},
        "b": {"run": {"name": "b"}, "train": {"lr": 2.0, "steps": 5, "x": None}},
    }
    for name, config in settings.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text(yaml.safe_dump(config))
    found = setting_differences([tmp_path / "a", tmp_path / "b"])
    assert [(one.key, one.values) for one in found] == [
        ("train.lr", {"a": 1.0, "b": 2.0}),
        ("train.x", {"b": None}),
    ]


async def test_a_list_does_not_wait_for_brokers_that_do_not_answer(tmp_path: Path) -> None:
    """Eight brokers accept and say nothing; the list is there at once, and later what they did not
    say.
    """
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(8)]
    for number, one in enumerate(listeners):
        note_broker(made(tmp_path, f"run{number}"), f"nats://127.0.0.1:{one.getsockname()[1]}")
    made(tmp_path, "local")
    listed = RunList(tmp_path)
    began = time.monotonic()
    states = {row.name: row.state for row in await listed.rows(wait_s=0.1)}
    assert time.monotonic() - began < 2.0
    assert states == {f"run{number}": "asking" for number in range(8)} | {"local": "stopped"}

    async def asked() -> bool:
        return all(row.state != "asking" for row in await listed.rows())

    await until(asked, 30.0)
    assert {row.state for row in await listed.rows()} == {"broker away", "stopped"}
    await listed.close()
    for one in listeners:
        one.close()


async def test_settings_are_read_in_a_thread_and_again_only_when_they_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[tuple[str, bool]] = []

    def noted(folder: Path) -> dict[str, Any]:
        read.append((folder.name, threading.current_thread() is threading.main_thread()))
        return original(folder)

    original = runs.read_settings
    monkeypatch.setattr(runs, "read_settings", noted)
    monkeypatch.setattr(runs, "LIST_S", 0.0)
    for name in ("a", "b"):
        made(tmp_path, name)
    listed = RunList(tmp_path)
    for _ in range(3):
        assert [row.steps for row in await listed.rows()] == [9, 9]
    assert sorted(read) == [("a", False), ("b", False)]
    (tmp_path / "b" / "config.yaml").write_text("run: {name: b}\ntrain: {steps: 10}\n")
    assert [row.steps for row in await listed.rows()] == [9, 10]
    assert sorted(read) == [("a", False), ("b", False), ("b", False)]
    await listed.close()
