"""Runs from Python: `rlearner.train` and `rlearner.Run` with real processes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
from waits import LONG_S, until

import rlearner
from rewardhub.rewards.base import Sample, Score
from rlearner.api.followed_command import FollowedCommand

ROWS = [{"question": f"Say a, {number}", "answer": "a"} for number in range(20)]
NUM_PROCESSES = 5  # rlearner up, the broker, and three that it starts next
SMALL = {
    "train": {"steps": 2, "groups_per_step": 2},
    "algorithm": {"filter_zero_variance": False},
    "trackers": {"use": []},
}
SCORES: dict[str, Score] = {"length": lambda sample: float(len(sample.response))}


def rows_of(table: Any) -> list[dict[str, Any]]:
    """The rows of a list, or of a DataFrame where pandas is installed."""
    return table if isinstance(table, list) else table.to_dict("records")


def num_children() -> int:
    """Processes below this one that run, without those of the test session itself."""
    return len(psutil.Process().children(recursive=True))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[rlearner.Run, list[str], int]:
    """A finished run, trained as a notebook does, the responses that its reward saw, and how many
    processes it has left.
    """
    responses: list[str] = []
    threads: set[str] = set()
    handlers: set[str] = set()

    def brevity(sample: Sample) -> float:
        responses.append(sample.response)
        threads.add(threading.current_thread().name)
        handlers.update(type(handler).__name__ for handler in logging.getLogger().handlers)
        return -float(len(sample.response)) - 0.25 * len(responses) % 3

    def letters(completions: list[str], answer: list[str], **columns: object) -> list[float]:
        return [float(text.count(letter)) for text, letter in zip(completions, answer, strict=True)]

    async def cell() -> rlearner.Run:
        rewards = [brevity, letters]
        return rlearner.train("tiny", ROWS, rewards, run={"name": "first"}, **SMALL)

    num_processes = num_children()
    with contextlib.chdir(tmp_path_factory.mktemp("python")):
        run = asyncio.run(cell())
    assert threads == {"reward-functions"}
    assert "RecentWarning" not in handlers
    return run, responses, num_children() - num_processes


def test_a_closure_trains_under_a_running_loop(
    trained: tuple[rlearner.Run, list[str], int],
) -> None:
    run, responses, num_left = trained
    rows = rows_of(run.metrics())
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["actor/grad_norm"] > 0 for row in rows)
    for row in rows:
        parts = [row[f"reward_parts/{name}/mean"] for name in ("brevity", "letters")]
        assert row["reward/mean"] == pytest.approx(sum(parts))
    assert len(responses) >= 2 * 2 * 8
    assert (num_left, run.is_running) == (0, False)


def test_samples_hold_what_the_function_saw(
    trained: tuple[rlearner.Run, list[str], int],
) -> None:
    run, responses, _ = trained
    samples = rows_of(run.samples())
    assert len(samples) >= 2 * 2 * 8
    assert {sample["reference"] for sample in samples} == {"a"}
    assert {sample["response"] for sample in samples} <= set(responses)
    letters = [sample["reward_parts"]["letters"] for sample in samples]
    assert letters == [sample["response"].count("a") for sample in samples]
    assert all("Say a, " in sample["prompt"] for sample in samples)


def test_evaluation_is_scored_by_the_function(
    trained: tuple[rlearner.Run, list[str], int],
) -> None:
    run, responses, _ = trained
    num_calls = len(responses)
    result = run.evaluate(eval={"tasks": 1, "group_size": 2})
    assert (result["tasks"], result["episodes"]) == (1, 2)
    assert len(responses) == num_calls + 2
    assert result["model"].startswith(str(run.folder / "checkpoints"))


def test_a_failing_function_ends_the_run_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    points = {"a": 1.0}

    def lookup(sample: object) -> float:
        return points["missing"]

    num_processes = num_children()
    with pytest.raises(rlearner.UserError) as caught:
        rlearner.train("tiny", ROWS, lookup, run={"name": "broken"}, **SMALL)
    line = lookup.__code__.co_firstlineno + 1
    text = f"lookup: KeyError: 'missing' (test_python_runs.py:{line} in lookup)"
    assert str(caught.value) == text
    assert isinstance(caught.value.__cause__, KeyError)
    assert num_children() == num_processes
    assert (tmp_path / "runs" / "broken" / "logs").is_dir()


def test_what_the_command_refuses_is_raised_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    command = FollowedCommand(
        ["up", "quickstart", "train.steps=-1"], tmp_path / "runs" / "x", SCORES
    )
    assert list(command.events()) == []
    with pytest.raises(rlearner.UserError, match=r"^train\.steps: -1 is not allowed; "):
        command.finish()


def start_program(folder: Path) -> subprocess.Popen[str]:
    # A shell's background jobs ignore the signal, and so would the program.
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "import rlearner; rlearner.Run('quickstart', run={'name': 'long'}).up().wait()"
    )
    return subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


async def test_an_interrupt_ends_all_processes(tmp_path: Path) -> None:
    program = start_program(tmp_path)
    parent = psutil.Process(program.pid)
    try:
        await until(lambda: len(parent.children(recursive=True)) >= NUM_PROCESSES, 4 * LONG_S)
        processes = parent.children(recursive=True)
        program.send_signal(signal.SIGINT)
        _, errors = await asyncio.to_thread(program.communicate, timeout=4 * LONG_S)
    finally:
        program.kill()
        program.wait()
    assert errors.rstrip().endswith("KeyboardInterrupt")
    assert [process.pid for process in processes if process.is_running()] == []
