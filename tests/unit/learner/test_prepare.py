"""What a learner does before it trains, in its second life."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from broker.settings.run_settings import RunSettings
from broker.settings.runspec import load
from learner.warm_start import ModelPreparation

SLOW = "import time\ntime.sleep(0.5)\nwhole = True\n"


def test_a_warm_start_begins_when_its_libraries_are_imported_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the demonstrations of an earlier life there is nothing to wait for but the import in its
    own thread.
    """
    (tmp_path / "slow_library.py").write_text(SLOW)
    monkeypatch.syspath_prepend(str(tmp_path))
    imported = importlib.import_module
    monkeypatch.setattr("learner.warm_start.import_module", lambda name: imported("slow_library"))
    (tmp_path / "demos.jsonl").write_text("")
    config = load("configs/quickstart.yaml", ["model.path=somebody/model"])
    preparation = ModelPreparation(RunSettings.of_config(config), tmp_path, lambda text: None)
    monkeypatch.setattr("learner.warm_start.base_model", lambda *_: "model")
    whole: list[bool] = []
    monkeypatch.setattr(
        preparation,
        "_train",
        lambda *_: whole.append(getattr(sys.modules.get("slow_library"), "whole", False)),
    )
    assert preparation.model_path() == str(tmp_path / "warm_start")
    assert whole == [True]
    sys.modules.pop("slow_library")


@pytest.mark.parametrize(
    ("steps", "is_made", "makes", "expected"),
    [
        (3, False, False, "model"),  # the checkpoint would replace it
        (3, False, True, "warm_start"),
        (3, True, False, "warm_start"),  # the first weights of the run, as a reference
        (0, True, False, "warm_start"),  # they stay what they are, whatever the settings say by now
        (0, True, True, "model"),
        (0, False, False, "model"),
    ],
)
def test_a_warm_start_is_made_only_where_it_is_missing_and_needed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    steps: int,
    is_made: bool,
    makes: bool,
    expected: str,
) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text("")
    config = load(
        "configs/quickstart.yaml",
        ["model.path=somebody/model", f"warm_start.steps={steps}", f"warm_start.data={data}"],
    )
    preparation = ModelPreparation(
        RunSettings.of_config(config), tmp_path, lambda text: None, make_warm_start=makes
    )
    monkeypatch.setattr("learner.warm_start.base_model", lambda *_: str(tmp_path / "model"))
    trained: list[str] = []
    monkeypatch.setattr(preparation, "_train", lambda path, data, out: trained.append(path))
    if is_made:
        (tmp_path / "warm_start").mkdir()
        (tmp_path / "warm_start" / "config.json").write_text("{}")
    assert preparation.model_path() == str(tmp_path / expected)
    assert trained == [str(tmp_path / "model")] * (bool(steps) and makes and not is_made)


def test_demonstrations_of_every_trained_domain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load("configs/several.yaml", ["domains.line.weight=0"])
    preparation = ModelPreparation(RunSettings.of_config(config), tmp_path, lambda text: None)
    commands: list[list[str]] = []

    def write(command: list[str], output: object) -> int:
        commands.append(command)
        name = command[command.index("--domain") + 1]
        Path(command[command.index("--out") + 1]).write_text(f"{name}\n")
        return 0

    monkeypatch.setattr(preparation, "_wait", write)
    monkeypatch.setattr("learner.warm_start.base_model", lambda *_: "model")
    trained: list[str] = []
    monkeypatch.setattr(preparation, "_train", lambda path, data, out: trained.append(data))
    preparation.model_path()
    assert trained == [str(tmp_path / "demos.jsonl")]
    # All that are trained, so not the line, which is only evaluated.
    assert (tmp_path / "demos.jsonl").read_text() == "programs\nlake\n"
    assert len(commands) == 2
