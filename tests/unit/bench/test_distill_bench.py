"""The figures of the distillation bench, from made-up curves, by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import distill
from bench.distill import (
    STATES,
    SUCCESS,
    Evaluated,
    RunCache,
    compare,
    read_evaluations,
    samples_until,
)
from learner.reporting.metrics import label_name


def curve(*points: tuple[int, float]) -> list[Evaluated]:
    return [Evaluated(*point) for point in points]


def test_both_methods_at_their_best_rate() -> None:
    curves = {
        "distill": [curve((0, 0.2), (64, 0.5), (128, 0.7)), curve((0, 0.2), (64, 0.8), (128, 0.6))],
        "grpo": [curve((0, 0.2), (640, 0.7)), curve((0, 0.2), (320, 0.5), (640, 0.65))],
    }
    # The target is GRPO's best, 0.7, below the teacher's 0.9 - 0.05: distillation reaches it after
    # 64 episodes at the second rate, GRPO after 640 at the first.
    assert compare(0.9, curves) == {
        "student_start": 0.2,
        "student_end": 0.7,
        "grpo_end": 0.7,
        "target": 0.7,
        "samples": 64,
        "grpo_samples": 640,
        "samples_ratio": 0.1,
    }
    # A weak teacher is the target: 0.55 - 0.05.
    figures = compare(0.55, curves)
    assert (figures["samples"], figures["grpo_samples"], figures["samples_ratio"]) == (64, 320, 0.2)


def test_a_target_that_is_not_reached() -> None:
    assert samples_until(curve((0, 0.2), (64, 0.3)), 0.4) is None
    curves = {"distill": [curve((0, 0.1), (9, 0.2))], "grpo": [curve((0, 0.1), (9, 0.6))]}
    assert compare(1.0, curves)["samples_ratio"] is None


def test_an_evaluation_counts_the_episodes_before_it() -> None:
    # It began after step 4 and stands in the line of step 5.
    rows = [{"step": 5, SUCCESS: 0.5, label_name(SUCCESS): 4}, {"step": 6}]
    assert read_evaluations(rows, 64) == [Evaluated(256, 0.5)]


def test_a_finished_run_is_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def run_up(arguments: list[str], kills: int) -> None:
        commands.append(arguments)
        name = next(word.partition("=")[2] for word in arguments if word.startswith("run.name="))
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True, exist_ok=True)
        row = {f"ticket/{state}": 0 for state in STATES} | {"step": 9, SUCCESS: 0.25}
        (folder / "metrics.jsonl").write_text(
            json.dumps(row | {"ticket/issued": 8, "ticket/trained": 8, label_name(SUCCESS): 8})
        )

    monkeypatch.setattr(distill, "run_up", run_up)
    monkeypatch.setattr(distill, "episodes_of", lambda folder: 64)
    results = tmp_path / "results"
    results.mkdir()
    cache = RunCache(tmp_path / "runs", results)
    first = cache.run("student", "x.yaml", ["train.lr=1"], teacher="there")
    assert first.evaluations == [Evaluated(512, 0.25)]
    assert (first.tickets["issued"], first.tickets["open"]) == (8, 0)
    assert "teachers.big.model_path=there" in commands[0]
    # Where the teacher is does not matter, what is trained does.
    assert RunCache(tmp_path / "runs", results).run("student", "x.yaml", ["train.lr=1"]) == first
    assert len(commands) == 1
    cache.run("student", "x.yaml", ["train.lr=2"])
    assert len(commands) == 2
