"""The benchmark of a pretrained model with real processes, on a small model with random weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import real_model


def test_a_small_run_gives_all_figures(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert (
        real_model.main(
            ["--tiny", "--recipes", "additions,forms", "--seeds", "1", "--out", str(tmp_path)]
        )
        == 0
    )
    figures = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert (figures["false_refusals"], figures["success_start"], len(figures["seeds"])) == (
        0,
        0.0,
        1,
    )
    assert figures["rows"]["forms"]["end"]["tasks"] == 4
    assert figures["rows"].keys() == {"forms"}
    stored = json.loads((tmp_path / "additions.seed0.json").read_text())
    assert len(stored["curve"]) == 2
    assert sorted(stored["evaluations"]) == ["0", "2"]
    assert (
        real_model.main(
            ["--tiny", "--report", "--only", "additions", "--seeds", "1", "--out", str(tmp_path)]
        )
        == 0
    )
    bound = ["--at-least", "0.1"]
    assert (
        real_model.main(
            ["--tiny", "--report", "--only", "additions", "--out", str(tmp_path), *bound]
        )
        == 1
    )
