"""The times of turns on a shared device: by hand, also if one turn trained every step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.shared import Told, seconds_of


def step_line(turns: int, seconds: float) -> dict[str, float]:
    """Return a step's metrics in which each phase of its turns took this long together."""
    names = ("turn_wait", "turn_load", "turn_offload", "train")
    return {f"time/{name}": seconds for name in names} | {"turns/count": turns}


def write_steps(path: Path, *lines: dict[str, float]) -> Path:
    """Write the metrics of a run."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def test_times_are_per_turn_and_leave_the_first_turn_out(tmp_path: Path) -> None:
    """Turns of 2, 3 and 5 s after a first of 9 s have the median 3 s."""
    metrics = write_steps(
        tmp_path / "metrics.jsonl",
        step_line(1, 9.0),
        step_line(1, 2.0),
        step_line(0, 0.0),
        step_line(2, 6.0),
        step_line(1, 5.0),
    )
    seconds = seconds_of(metrics, Told([0.5, 0.7], [0.25]))
    assert seconds["wait_s"] == seconds["load_s"] == seconds["offload_s"] == pytest.approx(3.0)
    assert seconds["sleep_s"] == pytest.approx(0.6)
    assert seconds["turn_s"] == pytest.approx(3 * 3.0 + 0.25)
    assert seconds["turns"] == 5


def test_one_turn_may_train_every_step(tmp_path: Path) -> None:
    """The only turn counts then, and what no server reported is None."""
    metrics = write_steps(tmp_path / "metrics.jsonl", step_line(1, 4.0), step_line(0, 0.0))
    seconds = seconds_of(metrics, Told([], []))
    assert seconds["wait_s"] == pytest.approx(4.0)
    assert seconds["turns"] == 1
    assert seconds["turn_s"] is seconds["wake_s"] is seconds["sleep_s"] is None
