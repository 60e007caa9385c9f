"""What `rlearner up` says before it starts anything and after all has ended; the fleet itself is
tested elsewhere.
"""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import run_folder_kit as kit
from bare_checkpoints import write_bare_checkpoint

from learner.credit.ledger import Ledger
from learner.run_folder import note_epoch
from rlearner.cli import main
from rlearner.up import artifacts
from rlearner.up.artifacts import write_artifacts
from rlearner.up.output import Output

RESUME = "go on with this run: rlearner up runs/a"


def written(folder: Path, step: int) -> None:
    """A checkpoint of that step, without weights."""
    ledger: dict[str, Any] = {**Ledger(kit.rules()).dump(), "version": step}
    write_bare_checkpoint(folder / "checkpoints", ledger)


def test_a_completed_run_is_told_so_and_nothing_is_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written(tmp_path / "a", 3)
    note_epoch(tmp_path / "a", 1, "")
    given = ["train.steps=3", f"run.dir={tmp_path}", "run.name=a"]
    assert main(["up", "configs/quickstart.yaml", *given]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "run a has completed its 3 steps: nothing is left to do; raise train.steps to continue, or choose another "
        "run.name",
        f"go on with this run: rlearner up {tmp_path / 'a'} train.steps=6",
    ]
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["checkpoints", "epoch"]


def test_a_run_that_was_stopped_says_what_failed_and_how_to_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(artifacts, "draw_rewards", lambda *_: None)
    folder = tmp_path / "a"
    asyncio.run(kit.World(folder, steps=2).learn())
    write_artifacts(folder, 5.0, {"learner": 1.0}, RESUME, Output())
    said = capsys.readouterr().out.splitlines()
    assert (
        f"failed groups: 2 (env_error 1, malformed 1); see {folder / 'logs'}, or rlearner trace {folder} TICKET"
        in said
    )
    assert f"  {RESUME}" in said[said.index("next:") :]


def test_before_the_first_step_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dead = '{"state":"issued","ticket":1}\n{"state":"dead","ticket":1,"seq":1,"reason":"reward_error"}\n'
    (tmp_path / "ledger").mkdir()
    (tmp_path / "ledger" / "step-000000.jsonl").write_text(
        '{"state":"summary","reasons":{}}\n' + dead
    )
    write_artifacts(tmp_path, 5.0, {}, "again: rlearner up 'my run.yaml' run.name=a", Output())
    assert capsys.readouterr().out.splitlines() == [
        f"stopped before the first step; logs are in {tmp_path / 'logs'}",
        f"failed groups: 1 (reward_error 1); see {tmp_path / 'logs'}, or rlearner trace {tmp_path} TICKET",
        "",
        "next:",
        "  again: rlearner up 'my run.yaml' run.name=a",
    ]
