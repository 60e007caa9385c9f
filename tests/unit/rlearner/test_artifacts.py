"""What ``rlearner up`` and ``rlearner draw`` draw: which figures at which steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from rlearner.ops.drawing import (
    domains_of,
    draw_rewards,
    evaluation_intervals,
    metric_curve,
    smooth_curve,
)

LINES: list[dict[str, Any]] = [
    {
        "step": 1,
        "reward/mean": 0.1,
        "reward/max": 1.0,
        "reward/a/mean": 0.0,
        "reward/b/mean": 0.2,
        "env/success_rate": 0.25,
    },
    {
        "step": 2,
        "reward/mean": 0.3,
        "env/success_rate": 0.5,
        "eval/success_rate": 0.2,
        "eval/step": 0.0,
    },
    {
        "step": 3,
        "reward/mean": 0.5,
        "env/success_rate": 0.5,
        "eval/success_rate": 0.4,
        "eval/step": 2.0,
        "eval/random/success_rate": 0.1,
    },
    {"step": 4, "reward/b/mean": 0.4, "eval/domain/a/success_rate": 0.5},
]


@pytest.mark.parametrize(
    ("name", "steps", "values"),
    [
        ("reward/mean", [1, 2, 3], [0.1, 0.3, 0.5]),
        ("reward/b/mean", [1, 4], [0.2, 0.4]),
        ("eval/success_rate", [0, 2], [0.2, 0.4]),
        ("eval/domain/a/success_rate", [4], [0.5]),
        ("reward/c/mean", [], []),
    ],
)
def test_a_curve_has_the_steps_that_were_measured(
    name: str, steps: list[int], values: list[float]
) -> None:
    assert metric_curve(LINES, name) == (steps, values)


def test_domains_are_those_with_a_reward_or_an_evaluation() -> None:
    assert domains_of(LINES) == ["a", "b"]
    assert domains_of([{"step": 1, "reward/b/mean": 0.4}]) == ["b"]
    only_evaluated = {"eval/domain/sokoban/success_rate": 0.1, "eval/random/success_rate": 0.2}
    assert domains_of([{"step": 1, "reward/b/mean": 0.4, **only_evaluated}]) == ["b", "sokoban"]


def test_the_picture_has_the_runs_name_two_scales_and_whole_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib import pyplot

    monkeypatch.setattr(pyplot, "close", lambda _: None)
    assert draw_rewards("first", LINES, tmp_path / "reward.png") == tmp_path / "reward.png"
    above, below = pyplot.gcf().axes
    monkeypatch.undo()
    assert (above.get_title(), above.get_ylabel(), below.get_ylabel(), below.get_xlabel()) == (
        "first",
        "reward",
        "success rate",
        "optimizer step",
    )
    assert [line.get_label() for line in above.lines] == ["training", "a", "b"]
    shown = ["training", "held-out tasks", "held-out tasks, a", "random engine, held-out tasks"]
    assert [line.get_label() for line in below.lines] == shown
    assert all(tick == int(tick) for tick in below.get_xticks())
    pyplot.close("all")
    with Image.open(tmp_path / "reward.png") as picture:
        assert picture.size == (960, 780)


def test_there_is_none_before_the_first_step(tmp_path: Path) -> None:
    assert draw_rewards("first", [], tmp_path / "reward.png") is None
    assert not (tmp_path / "reward.png").exists()


def test_curves_are_smoothed_and_points_have_intervals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib import pyplot

    monkeypatch.setattr(pyplot, "close", lambda _: None)
    lines = [{"step": step, "reward/mean": float(step % 2)} for step in range(1, 41)]
    lines[-1] |= {"eval/success_rate": 0.5, "eval/step": 40.0}
    (tmp_path / "evals").mkdir()
    rows = [{"success": [number < 8]} for number in range(16)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "evals" / "actor-step-000040.jsonl").write_text(text)
    draw_rewards("first", lines, tmp_path / "reward.png")
    above, below = pyplot.gcf().axes
    monkeypatch.undo()
    pale, smoothed = above.lines
    assert (pale.get_alpha(), list(pale.get_ydata())) == (0.25, [1.0, 0.0] * 20)
    assert list(smoothed.get_ydata()) == smooth_curve([1.0, 0.0] * 20)
    (interval,) = [path.vertices.tolist() for path in below.collections[0].get_paths()]
    assert interval == [[40, pytest.approx(0.27999, abs=1e-4)], [40, pytest.approx(0.72, abs=1e-4)]]
    pyplot.close("all")


def test_smoothing_keeps_length_and_ends() -> None:
    assert smooth_curve([1.0, 2.0, 3.0]) == [1.0, 2.0, 3.0]
    smoothed = smooth_curve([0.0, 3.0] * 10)
    assert smoothed[:3] == [1.5, 1.0, 2.0]
    assert len(smoothed) == 20
    assert smooth_curve([]) == []


def test_a_run_without_evaluations_has_no_intervals(tmp_path: Path) -> None:
    assert evaluation_intervals(tmp_path) == {}
