"""Trackers: every name resolves to something that logs and closes; a broken one costs the run
nothing.
"""

from __future__ import annotations

import io
import sys
import types
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from broker.errors import ConfigError
from learner.config import TrackersSection
from learner.reporting.trackers import TrackerGroup


def _shown(kind: str, content: Any, **more: Any) -> tuple[Any, ...]:
    return (
        kind,
        content.getvalue() if isinstance(content, io.BytesIO) else content,
        *more.values(),
    )


# A step of W&B's is closed once a later one is logged, so what belongs to an earlier one names it
# itself.
LATER = {
    "wandb": [
        (None, {"samples/lake": ("Html", "<p>step 3</p><pre>a &lt; b</pre>")}),
        (None, {"episodes/lake": ("Video", b"GIF89a", "step 3", "gif")}),
    ],
    "swanlab": [
        (3, {"samples/lake": ("Text", "a < b")}),
        (3, {"episodes/lake": ("Video", b"GIF89a")}),
    ],
}
TABLES = {  # as the library takes them
    "wandb": (None, {"trajectories/eval": ("Table", ["step", "text"], [[3, "R"]])}),
    "swanlab": (3, {"trajectories/eval": (["step", "text"], [[3, "R"]])}),
}


class Recorder:
    """Stands in for the library of a tracker and remembers the calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def init(self, **settings: Any) -> Recorder:
        self.calls.append(("init", settings))
        return self

    def log(self, values: dict[str, Any], step: int | None = None, *, commit: bool = True) -> None:
        self.calls.append(("log", (step, values)))

    def define_metric(self, name: str, step_metric: str) -> None:
        self.axis = name, step_metric

    def finish(self) -> None:
        self.calls.append(("finish", None))


def test_tensorboard_is_always_there(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trackers = TrackerGroup(TrackersSection(use=[]), tmp_path, "demo", {})
    trackers.log(1, {"reward/mean": 0.25, "staleness/max": 1.0})
    trackers.log(2, {"reward/mean": 0.75})
    trackers.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert sorted(events.Tags()["scalars"]) == ["reward/mean", "staleness/max"]
    assert [(event.step, event.value) for event in events.Scalars("reward/mean")] == [
        (1, 0.25),
        (2, 0.75),
    ]


def test_tensorboard_shows_settings_texts_and_pictures(tmp_path: Path) -> None:
    """Read back by TensorBoard itself."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.metadata import (
        SESSION_START_INFO_TAG,
        parse_session_start_info_plugin_data,
    )

    config = {
        "train": {"lr": 0.001, "steps": 3, "stream": True},
        "model": {"path": None},
        "domains": {"lake": {"rewards": ["a", "b"]}},
    }
    trackers = TrackerGroup(TrackersSection(use=[]), tmp_path, "demo", config)
    trackers.texts(2, {"samples/lake": "**x** ü"})
    picture = io.BytesIO()
    Image.new("RGB", (30, 20)).save(picture, format="GIF")
    trackers.picture(4, "episodes/lake", picture.getvalue())
    trackers.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert events.Tags()["tensors"] == ["samples/lake"]
    (text,) = events.Tensors("samples/lake")
    assert (text.step, text.tensor_proto.string_val[0].decode()) == (2, "**x** ü")
    assert "samples/lake" in events.PluginTagToContent("text")
    (image,) = events.Images("episodes/lake")
    assert (image.step, image.width, image.height, image.encoded_image_string) == (
        4,
        30,
        20,
        picture.getvalue(),
    )
    content = events.PluginTagToContent("hparams")[SESSION_START_INFO_TAG]
    started = parse_session_start_info_plugin_data(content)
    assert started.group_name == "demo"
    settings = started.hparams
    assert (settings["train.lr"].number_value, settings["train.steps"].number_value) == (0.001, 3.0)
    assert settings["train.stream"].bool_value
    assert (settings["model.path"].string_value, settings["domains.lake.rewards"].string_value) == (
        "None",
        "['a', 'b']",
    )


class Echarts:
    """SwanLab's module of tables."""

    class Table:
        def add(self, headers: list[str], rows: list[list[Any]]) -> None:
            self.content = headers, rows


def plain(values: dict[str, Any]) -> dict[str, Any]:
    return {
        name: one.content if isinstance(one, Echarts.Table) else one for name, one in values.items()
    }


# the others are tested with the real libraries only
@pytest.mark.parametrize("name", sorted(LATER))
def test_extras_hand_on_what_they_get(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder, module = Recorder(), types.ModuleType(name)
    for function in ("init", "log", "finish"):
        setattr(module, function, getattr(recorder, function))
    for kind in ("Html", "Text", "Video"):
        setattr(module, kind, partial(_shown, kind))
    module.Table = lambda columns, data: ("Table", columns, data)  # type: ignore[attr-defined]
    module.echarts = Echarts  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, f"learner.reporting.trackers.{name}", raising=False)
    section = TrackersSection(use=[name], project="lakes", args={name: {"mode": "offline"}})
    trackers = TrackerGroup(section, tmp_path, "demo", {"train": {"steps": 3}})
    trackers.log(4, {"reward/mean": 0.5})
    trackers.texts(3, {"samples/lake": "a < b"})
    trackers.picture(3, "episodes/lake", b"GIF89a")
    trackers.table(3, "trajectories/eval", ("step", "text"), [(3, "R")])
    trackers.table(3, "trajectories/eval", ("step", "text"), [])  # nothing to show
    trackers.close()
    monkeypatch.delitem(sys.modules, f"learner.reporting.trackers.{name}")
    kinds = [kind for kind, _ in recorder.calls]
    assert kinds == ["init", "log", "log", "log", "log", "finish"]
    settings = recorder.calls[0][1]
    assert (settings["project"], settings["mode"], settings["config"]) == (
        "lakes",
        "offline",
        {"train": {"steps": 3}},
    )
    assert (settings["name"], settings["id"], settings["resume"]) == ("demo", "demo", "allow")
    assert [call[1] for call in recorder.calls[1:4]] == [(4, {"reward/mean": 0.5}), *LATER[name]]
    step, values = recorder.calls[4][1]
    assert (step, plain(values)) == TABLES[name]


def test_wandb_row_of_a_later_step_takes_an_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """W&B drops what is logged for a step before the newest."""
    recorder = Recorder()
    module = types.ModuleType("wandb")
    module.init = recorder.init  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.delitem(sys.modules, "learner.reporting.trackers.wandb", raising=False)
    trackers = TrackerGroup(TrackersSection(use=["wandb"]), tmp_path, "demo", {})
    trackers.log(4, {"reward/mean": 0.5})
    trackers.log(0, {"eval/step": 0.0, "eval/success_rate": 0.25})
    trackers.log(5, {"reward/mean": 0.75})
    trackers.close()
    monkeypatch.delitem(sys.modules, "learner.reporting.trackers.wandb")
    assert recorder.axis == ("eval/*", "eval/step")
    assert [content for kind, content in recorder.calls if kind == "log"] == [
        (4, {"reward/mean": 0.5}),
        (None, {"eval/step": 0.0, "eval/success_rate": 0.25}),
        (5, {"reward/mean": 0.75}),
    ]


class Broken:
    """Fails at its second line."""

    logged: list[int] = []  # noqa: RUF012  # read by the test

    def __init__(self, *_: object) -> None:
        self.logged.clear()

    def log(self, step: int, values: dict[str, float]) -> None:
        if step == 2:
            raise ConnectionError("no network")
        self.logged.append(step)

    def close(self) -> None:
        raise AssertionError("it was left out")


def test_a_broken_tracker_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trackers = TrackerGroup(TrackersSection(use=[f"{__name__}:Broken"]), tmp_path, "demo", {})
    for step in (1, 2, 3):
        trackers.log(step, {"a": 1.0})
    trackers.close()
    assert Broken.logged == [1]
    assert "failed at step 2 and is disabled" in caplog.text


def test_what_comes_after_the_end_is_dropped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A picture that is still drawn in a thread as the learner leaves."""
    trackers = TrackerGroup(TrackersSection(use=[]), tmp_path, "demo", {})
    trackers.close()
    trackers.picture(4, "episodes/lake", b"GIF89a")
    trackers.log(5, {"a": 1.0})
    assert caplog.text == ""


def test_an_unknown_or_missing_one_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="known: mlflow, swanlab, tensorboard, trackio, wandb"):
        TrackerGroup(TrackersSection(use=["neptune"]), tmp_path, "demo", {})
