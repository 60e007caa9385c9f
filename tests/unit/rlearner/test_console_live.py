"""What the console still shows of processes that are gone."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from bench.advice.speeds import FleetSpeeds
from bench.advice.virtual_run import run_fleet, settings_of
from broker.contract import wire
from broker.settings.run_address import ADDRESS
from rlearner.advise.advice import advise
from rlearner.console.index.follower import RunFollower
from rlearner.console.index.live_spans import LiveSpans
from rlearner.console.live import LiveRun
from rlearner.console.pages.overview import _find_bottleneck, _run_state
from rlearner.console.state import ConsoleRun


def metrics(process: str) -> wire.Metrics:
    return wire.Metrics(role="envhub", id=process, time=1.0, values={"process/cpu_s": 1.0})


def test_metrics_of_dead_processes_are_forgotten(tmp_path: Path) -> None:
    live = LiveRun("run", tmp_path, None, LiveSpans())
    for number, at in ((1, 100.0), (2, 100.0), (3, 104.0)):
        live.view.metrics[f"envhub.{number}"], live._heard[f"envhub.{number}"] = (
            metrics(str(number)),
            at,
        )
    live._forget_silent({"envhub.1"}, 105.5)
    assert set(live.view.metrics) == {"envhub.1", "envhub.3"}  # announced, and heard just now
    live._forget_silent(set(), 110.0)
    assert live.view.metrics == {}
    assert live._heard == {}


def test_a_learner_is_not_said_to_train_once_its_broker_is_gone(tmp_path: Path) -> None:
    live = LiveRun("run", tmp_path, None, LiveSpans())
    run = ConsoleRun.__new__(ConsoleRun)
    run.config = {"train": {"steps": 9}}
    run.folder = tmp_path
    live.view.problem = ""
    live.view.processes = [
        wire.Presence(role="learner", id="learner", pid=1, host="here", state="serving")
    ]
    assert _run_state(run, 3, live.view) == ("training", "", "good")
    live.view.problem = "the broker at here does not answer now"
    assert _run_state(run, 3, live.view) == (
        "broker away",
        "the broker at here does not answer now",
        "warn",
    )


async def test_a_page_waits_a_moment_for_the_index(monkeypatch: pytest.MonkeyPatch) -> None:
    states = iter(["building", "rebuilding", "current"])
    run = ConsoleRun.__new__(ConsoleRun)
    run._loop = asyncio.get_running_loop()
    run.follower = cast(
        "RunFollower", SimpleNamespace(status=lambda: SimpleNamespace(state=next(states)))
    )
    await run.settle()
    assert list(states) == []
    monkeypatch.setattr("rlearner.console.state.SETTLE_S", 0.0)
    states = iter(["building"] * 99)
    await run.settle()
    assert len(list(states)) > 90


async def test_an_unreadable_note_of_the_broker_is_said_and_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RETRY_S", "TELL_S", "CONNECT_S"):
        monkeypatch.setattr(f"rlearner.console.live.{name}", 0.05)
    live = LiveRun("run", tmp_path, None, LiveSpans())
    note, said = tmp_path / ADDRESS, asyncio.Event()
    note.write_bytes(b"\xff")
    live.listen(said.set)
    async with asyncio.timeout(10):
        for _ in range(3):
            await said.wait()
            said.clear()
            assert live.view.problem.startswith("UnicodeDecodeError: ")
        note.write_text("nats://127.0.0.1:1")
        while live.view.problem.startswith("UnicodeDecodeError: "):
            await said.wait()
            said.clear()
    assert live.view.problem.startswith("no live data: ")
    await live.close()


async def test_a_page_that_comes_while_the_connection_is_closed_gets_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = LiveRun("run", tmp_path, None, LiveSpans())
    closing, closed, again = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def follow() -> None:
        if closed.is_set():
            again.set()
            await asyncio.Event().wait()
        closing.set()
        await closed.wait()

    monkeypatch.setattr(live, "_follow", follow)
    live.listen(lambda: None)()
    await closing.wait()
    live.listen(lambda: None)
    closed.set()
    async with asyncio.timeout(5):
        await again.wait()
    await live.close()


def test_a_run_of_an_older_version_has_no_bottleneck_and_no_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rows = run_fleet(FleetSpeeds(), 12)
    settings = settings_of(FleetSpeeds(), 12)
    config = settings.to_plain()
    assert _find_bottleneck(rows, config) == advise(rows, settings).line
    assert (
        _find_bottleneck(rows[:1], config) == "not known: needs 5 more steps of the present fleet"
    )
    for older in ({}, {"train": None}, config | {"train": {"steps": 12, "max_staleness": 1}}):
        assert _find_bottleneck(rows, older) == ""
    assert caplog.records == []
