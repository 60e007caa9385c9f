"""The rows of ``bench.curves`` and their table, by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import curves
from bench.curves import Recipe, evaluations_of, make_row, mean_of, measure_run
from bench.support import curves_report


def write_evaluation(run: Path, policy: str, step: int, successes: dict[str, list[bool]]) -> None:
    folder = run / "evals"
    folder.mkdir(exist_ok=True, parents=True)
    rows = [
        {
            "domain": domain,
            "task_index": index,
            "success": [success],
            "reward": [0.0],
            "versions": None,
        }
        for domain, column in successes.items()
        for index, success in enumerate(column)
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / f"{policy}-step-{step:06d}.jsonl").write_text(text)


def test_rows_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        curves.RECIPES,
        "both",
        Recipe("configs/transfer.yaml", {"a": "first", "b": "second"}),  # type: ignore[index]
    )
    write_evaluation(tmp_path, "actor", 0, {"a": [True] + [False] * 9, "b": [True, False]})
    write_evaluation(tmp_path, "actor", 10, {"a": [True] * 5 + [False] * 5, "b": [True, False]})
    write_evaluation(tmp_path, "actor", 20, {"a": [True] * 9 + [False], "b": [True, False]})
    write_evaluation(tmp_path, "random", 0, {"a": [False] * 10})
    first, second = measure_run("both", tmp_path, 1.5)
    # Wilson's interval of 9 of 10: (0.9 + z^2 / 20 -+ z sqrt(0.09 / 10 + z^2 / 400)) / (1 + z^2 / 10)
    assert first == {
        "name": "both_a",
        "title": "first",
        "start": 0.1,
        "end": 0.9,
        "interval": [0.5958, 0.9821],
        "random": 0.0,
        "above": True,
        "minutes": 1.5,
    }
    assert (second["name"], second["random"], second["above"]) == ("both_b", None, False)


def test_a_run_without_evaluations(tmp_path: Path) -> None:
    assert evaluations_of(tmp_path, "random") == []


def test_the_mean_of_turns_counts_each_episode_once() -> None:
    assert mean_of([[True, True, True, False], [False]]) == 0.375
    row = make_row("v", "valid", [[True, False]], [[True, True]], None)
    assert (row["start"], row["end"], row["random"]) == (0.5, 1.0, None)


def test_the_table_stands_between_its_marks(tmp_path: Path) -> None:
    page = tmp_path / "learning.md"
    page.write_text(f"before\n{curves_report.BEGIN}\nold\n{curves_report.END}\nafter\n")
    row = make_row("v", "a title", [[False]], [[True]], 0.25) | {"minutes": 1.26}
    curves_report.write(tmp_path, [row])
    lines = page.read_text().splitlines()
    assert (lines[0], lines[-1]) == ("before", "after")
    assert "| a title | 0.250 | 0.000 | 1.000 (0.206-1.000) | 1.3 |" in lines
    assert "old" not in lines


def test_published_results_make_the_table_without_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "results"
    results.mkdir()
    row = make_row("lakes", "frozen lakes", [[False]], [[True]], 0.0) | {"minutes": 2.0}
    stored = {"overrides": ["eval.at_start=true"], "rows": [row]}
    (results / "lakes.json").write_text(json.dumps(stored))
    page = tmp_path / "learning.md"
    page.write_text(f"{curves_report.BEGIN}\n{curves_report.END}\n")
    words = ["--only", "lakes", "--report", "--docs", str(tmp_path), "--out", str(tmp_path / "out")]
    assert curves.main([*words, "--results", str(results)]) == 0
    assert json.loads(capsys.readouterr().out)["not_above"] == []
    assert "| frozen lakes | 0.000 |" in page.read_text()
    # A result of other settings is none.
    (results / "lakes.json").write_text(json.dumps(stored | {"overrides": []}))
    assert curves.main([*words, "--results", str(results)]) == 2
