"""What the console still shows of processes that are gone."""

from __future__ import annotations

from pathlib import Path

from broker.contract import wire
from rlearner.console.index.live_spans import LiveSpans
from rlearner.console.live import LiveRun
from rlearner.console.pages.overview import _state
from rlearner.console.state import ConsoleRun


def metrics(process: str) -> wire.Metrics:
    return wire.Metrics(role="envhub", id=process, time=1.0, values={"process/memory_bytes": 1.0})


def test_metrics_of_dead_processes_are_forgotten(tmp_path: Path) -> None:
    live = LiveRun("run", tmp_path, None, LiveSpans())
    for number, at in ((1, 100.0), (2, 100.0), (3, 104.0)):
        live.view.metrics[f"envhub.{number}"], live._heard[f"envhub.{number}"] = metrics(str(number)), at
    live._forget_silent({"envhub.1"}, 105.5)
    assert set(live.view.metrics) == {"envhub.1", "envhub.3"}  # announced, and heard just now
    live._forget_silent(set(), 110.0)
    assert live.view.metrics == {}
    assert live._heard == {}


def test_a_learner_is_not_said_to_train_once_its_broker_is_gone(tmp_path: Path) -> None:
    live = LiveRun("run", tmp_path, None, LiveSpans())
    run = ConsoleRun.__new__(ConsoleRun)
    run.config = {"train": {"steps": 9}}
    live.view.problem = ""
    live.view.processes = [wire.Presence(role="learner", id="learner", pid=1, host="here", state="serving")]
    assert _state(run, 3, live.view) == ("training", "", "good")
    live.view.problem = "the broker at here does not answer now"
    assert _state(run, 3, live.view) == ("broker away", "the broker at here does not answer now", "warn")
