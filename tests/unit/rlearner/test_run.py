"""`rlearner.Run` before any process starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import rlearner
from broker.settings.run_address import UP_LOCK, address_by
from rewardhub.rewards.caller import VARIABLE
from rlearner.api.reward_functions import RewardFunctions
from rlearner.cli import main


def points(sample: object) -> float:
    return 1.0


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = (
        "import sys, rlearner; print(len([m for m in sys.modules if m.startswith('rlearner')]), "
        "'torch' in sys.modules, 'Run' in dir(rlearner), rlearner.UserError.__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "1 False True UserError\n"
    with pytest.raises(AttributeError, match="no attribute 'Trainer'"):
        rlearner.Trainer  # noqa: B018


def test_errors_have_the_line_of_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["check", "quickstart", "train.steps=-1"]) == 2
    with pytest.raises(rlearner.UserError) as caught:
        rlearner.Run("quickstart", train={"steps": -1}).up()
    assert capsys.readouterr().err == f"error: {caught.value}\n"
    assert list(tmp_path.iterdir()) == []


def test_a_mapping_is_checked_as_a_file_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = {"inherit": "configs/quickstart.yaml", "run": {"name": "mine", "dir": "kept"}}
    run = rlearner.Run(config, trian={"steps": 1})
    assert (run.name, run.folder) == ("mine", tmp_path / "kept" / "mine")
    with pytest.raises(rlearner.UserError, match=r"^trian: .*did you mean 'train'"):
        run.up()
    assert not (tmp_path / "kept").exists()
    for config in ({"run": "mine"}, "quickstart"):
        with pytest.raises(rlearner.UserError, match=r"^run: 'mine' is not allowed; expected a"):
            rlearner.Run(config, **({"run": "mine"} if config == "quickstart" else {}))
    with pytest.raises(rlearner.UserError, match="run mine was not started here; call up"):
        run.wait()


def test_a_program_without_the_function_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    rewards = 'domains.lake.rewards=[{name: "rewardhub.rewards.caller:points", pool: caller}]'
    assert main(["up", "quickstart", rewards]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        "error: domains.lake.rewards.0.name: points is a function of the Python program that "
        "started the run; continue the run from there, or name a file: rewards.py:points"
    )
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setenv(VARIABLE, "points")
    assert main(["check", "quickstart", rewards]) == 0
    assert "points is a function" not in capsys.readouterr().err


def test_functions_get_names_and_other_rewards_stay() -> None:
    rewards = RewardFunctions([points, lambda sample: 0.0, points, "length", {"name": "format"}])
    assert [entry["name"].rpartition(":")[2] for entry in rewards.entries] == [
        "points", "reward", "points_2", "length", "format",
    ]  # fmt: skip
    assert list(rewards.functions) == ["points", "reward", "points_2"]
    domain = {"rewards": [rewards.entries[0]]}
    assert rewards.missing_in(domain) == rewards.entries[1:]
    with pytest.raises(rlearner.UserError, match="reward_funcs: 3 is not allowed"):
        RewardFunctions([3])  # type: ignore[list-item]


def test_the_address_is_that_of_the_newest_process(tmp_path: Path) -> None:
    assert address_by(tmp_path, 12) == ""
    (tmp_path / UP_LOCK).write_text("12\nnats://a:1\n112\nnats://b:2\n12\n")
    assert address_by(tmp_path, 12) == ""
    (tmp_path / UP_LOCK).write_text("12\nnats://a:1\n112\nnats://b:2\n12\nnats://c:3\n")
    assert [address_by(tmp_path, pid) for pid in (12, 112, 2)] == ["nats://c:3", "nats://b:2", ""]
