"""``rlearner diff``: what differs between two runs, and nothing that is the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import run_folder_kit as kit
import yaml
from bare_checkpoints import write_bare_checkpoint
from safetensors.numpy import save_file

from learner.credit.ledger import Ledger
from learner.reporting import starts
from rlearner.cli import main
from rlearner.ops.diff import text_of

ENVIRONMENT = "class Env: ...\n"


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two runs that differ in a rate, an added section, a data file, an environment, numpy and the
    first weights.
    """
    monkeypatch.chdir(tmp_path)
    for name, rate, success, size in (("a", 1e-3, 0.25, 4.0), ("b", 1e-4, 0.75, 5.0)):
        code = tmp_path / f"env_{name}.py"
        code.write_text(ENVIRONMENT + f"# {name}\n" * (name == "b"))
        config: dict[str, Any] = {
            "run": {"name": name, "dir": str(tmp_path), "seed": 3},
            "train": {"lr": rate, "steps": 3},
            "domains": {"lake": {"env": f"./{code.name}:Env", "rewards": []}},
        }
        if name == "b":
            config["algorithm"] = {"kl_coef": 0.1}
        folder = tmp_path / name
        (folder / "model").mkdir(parents=True)
        weights = np.zeros(600_000, np.float32)
        weights[-1] = size
        save_file({"w": weights}, folder / "model" / "model.safetensors")
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        rows = [
            {"step": 1, "eval/success_rate": success},
            {"step": 2, "reward/mean": success / 2, "time": 5.0},
        ]
        (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        monkeypatch.setattr(
            starts,
            "package_versions",
            lambda name=name: {"wire": "12", "numpy": {"a": "2.1", "b": "2.2"}[name]},
        )
        starts.note_start(folder, config, 1, {"train.jsonl": name * 4}, str(folder / "model"))
    return tmp_path


def test_what_differs_is_shown_and_the_rest_is_counted(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diff", "a", "b", "--dir", str(runs), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["settings"] == {
        "algorithm.kl_coef": [None, 0.1],
        "domains.lake.env": ["./env_a.py:Env", "./env_b.py:Env"],
        "train.lr": [0.001, 0.0001],
    }
    assert found["versions"] == {"numpy": ["2.1", "2.2"]}
    assert found["data"] == {"train.jsonl": ["aaaa", "bbbb"]}
    digest = starts.code_digests({"env": "./env_a.py:Env"})["./env_a.py"]
    assert found["code"]["./env_a.py"] == [digest, None]
    assert found["model"]["digest"][0] != found["model"]["digest"][1]
    assert found["figures"]["eval/success_rate"] == [0.25, 0.75]
    assert found["same"] == {"settings": 3, "versions": 1, "code": 1, "data": 0, "model": 0}
    assert found["not_recorded"] == []
    assert main(["diff", "a", "b", "--dir", str(runs)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["a", "b"]
    (rate,) = (line for line in lines if "train.lr" in line)
    assert rate.split() == ["train.lr", "0.001", "0.0001"]
    (success,) = (line for line in lines if "eval/success_rate" in line)
    assert success.split() == ["eval/success_rate", "0.25", "0.75", "+0.5"]
    assert {line.index("0.001") for line in (rate,)} == {success.index("0.25")}  # one column
    assert lines[-1] == "the same: 3 settings, 1 versions, 1 code"


def test_a_run_and_itself(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_bare_checkpoint(runs / "a" / "checkpoints", {**Ledger(kit.rules()).dump(), "version": 2})
    assert main(["diff", str(runs / "a"), "a", "--dir", str(runs), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [found[name] for name in ("settings", "versions", "code", "data", "model")] == [{}] * 5
    assert found["same"]["model"] == 3  # path, digest, checkpoint


def test_a_run_of_an_earlier_version_and_one_that_is_not_there(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (runs / "a" / "starts.jsonl").unlink()
    assert main(["diff", "a", "b", "--dir", str(runs)]) == 0
    assert capsys.readouterr().out.endswith(
        "not recorded of a, which an earlier version started: versions, code, data, model\n"
    )
    assert main(["diff", "a", "c", "--dir", str(runs)]) == 2
    assert (
        capsys.readouterr().err
        == f"error: no run 'c' below {runs}; there is a, b; name its folder, or give --dir\n"
    )


def test_long_values_are_cut_to_the_terminal() -> None:
    found = {
        "runs": [{"name": "a", "step": 1}, {"name": "b", "step": 2}],
        "settings": {
            "model.path": ("x" * 200, "y"),
            "domains.sea.env": (None, "frozenlake"),
            "domains.sea.group_size": (None, 8),
            "domains.lake.group_size": (4, 8),
            "run.note": ("", None),
        },
        **{name: {} for name in ("versions", "code", "data", "model")},
        "figures": {},
        "same": {},
        "not_recorded": [],
    }
    lines = list(text_of(found, 80))
    assert max(map(len, lines)) <= 80
    assert lines[2].split()[:1] == ["model.path"]
    assert "x" * 20 in lines[2]
    assert "…" in lines[2]
    assert "x" * 200 in "".join(text_of(found))
    names = [line.split()[0] for line in lines if line.startswith("  ")]
    # of a lone domain one line
    assert names[-3:] == ["domains.sea.env", "domains.lake.group_size", "run.note"]
    assert lines[-4].split() == ["run.note", "''", "-"]


def test_a_torn_line_of_a_crash_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "starts.jsonl").write_text('{"epoch": 1}\n{"epo')
    assert starts.read_starts(tmp_path) == [{"epoch": 1}]
    assert starts.read_starts(tmp_path / "none") == []


def test_a_start_that_cannot_be_noted_is_only_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "starts.jsonl").mkdir()
    starts.note_start(tmp_path, {}, 1, {}, "hub/model")
    assert (
        f"{tmp_path / 'starts.jsonl'} does not get this start: [Errno 21] Is a directory"
        in caplog.text
    )


def test_a_model_file_that_cannot_be_read_does_not_fail_a_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unreadable(folder: Path) -> str:
        raise PermissionError(13, "Permission denied", str(folder / "model.safetensors"))

    monkeypatch.setattr(starts, "model_digest", unreadable)
    starts.note_start(tmp_path, {}, 1, {}, str(tmp_path))
    assert "model.safetensors" in caplog.text
    assert starts.read_starts(tmp_path) == []
