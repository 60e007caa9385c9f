"""``rlearner check`` of a run that exists refuses what its learner would refuse."""

from __future__ import annotations

from pathlib import Path

import pytest
from bare_checkpoints import write_bare_checkpoint

from learner.prepare import to_yaml
from rlearner.cli import main

QUICK = "configs/quickstart.yaml"


def test_fewer_steps_than_a_run_has_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["check", QUICK, f"run.dir={tmp_path}", "run.name=a"]
    assert main(words) == 0
    write_bare_checkpoint(tmp_path / "a" / "checkpoints", {"version": 99})
    capsys.readouterr()
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(
        "error: train.steps: 40 is not allowed; run a has made 99 steps already: "
    )


def test_another_model_than_the_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["check", QUICK, f"run.dir={tmp_path}", "run.name=a", "--json"]
    assert main(words) == 0
    model = tmp_path / "a" / "model"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    sections = {"run": {"name": "a"}, "model": {"tiny": {"hidden_size": 32}}, "domains": {}}
    (tmp_path / "a" / "config.yaml").write_text(to_yaml(sections))
    capsys.readouterr()
    assert main(words) == 2
    assert "error: model.tiny.hidden_size: 128 is not allowed; run a began with 32" in (
        capsys.readouterr().err
    )
