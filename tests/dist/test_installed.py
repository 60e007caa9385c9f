"""The wheel in an environment of its own: it trains the quickstart from an empty folder, by ``make
test-dist``.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

BIN = os.environ.get("RL_DIST_BIN")  # of the environment that has the wheel
pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not BIN, reason="needs the wheel in an environment of its own: make test-dist"),
]


def ran(folder: Path, *words: str, code: int = 0) -> str:
    """Return what a command of the environment prints, run in a folder, with nothing of this clone.
    """
    environment = {"PATH": f"{BIN}:/usr/bin:/bin", "HOME": str(folder.parent), "OMP_NUM_THREADS": "1"}
    program, *rest = words
    done = subprocess.run(
        [f"{BIN}/{program}", *rest], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty folder."""
    return tmp_path_factory.mktemp("empty") / "here"


def test_the_quickstart_trains_from_an_empty_folder(empty: Path) -> None:
    empty.mkdir()
    place = ran(empty, "python", "-c", "import rlearner, learner; print(rlearner.__file__, learner.__file__)").split()
    assert all("site-packages" in path for path in place)
    lines = ran(empty, "rlearner", "up", "quickstart", "run.name=quick", "--json").splitlines()
    events: list[dict[str, Any]] = [json.loads(line) for line in lines]
    assert [one["step"] for one in events if one["event"] == "step"] == list(range(1, 41))
    ended = events[-1]
    assert (ended["event"], ended["step"], ended["failed"]) == ("ended", 40, [])
    assert {path.name for path in empty.iterdir()} == {"runs"}
    evaluated = [one["figures"]["eval/success_rate"] for one in events if "eval/success_rate" in one.get("figures", {})]
    assert evaluated[-1] > evaluated[0] + 0.1  # it learns
    audit = json.loads(ran(empty, "rlearner", "audit", "quick", "--json"))
    assert (audit["ok"], audit["trained"], audit["lost"], audit["trained_twice"]) == (True, 640, 0, 0)
    shown = [json.loads(line) for line in ran(empty, "rlearner", "logs", "quick", "learner", "--json").splitlines()]
    assert any(entry["message"].startswith("step 40 of 40") for entry in shown)


@pytest.mark.parametrize("name", ["quickstart", "configs/sokoban.yaml", "frozenlake.yaml", "webshop"])
def test_configurations_of_the_package_are_found_by_name(name: str, tmp_path: Path) -> None:
    found = json.loads(ran(tmp_path, "rlearner", "check", name, "--json", "--no-trial"))
    assert found["config"]["train"]["steps"] > 0
    assert [one for one in found["findings"] if one["status"] == "missing"] == []


def test_commands_find_what_they_need_of_the_package(tmp_path: Path) -> None:
    ran(tmp_path, "rlearner", "new", "mine")
    assert "environment.py" in {path.name for path in (tmp_path / "mine").iterdir()}
    ran(tmp_path, "rlearner", "check", "mine/mine.yaml")
    assert ran(tmp_path, "rlearner", "check", "quickstart", "algorithm=gspo", "--no-trial", "--all").count("pg_variant: gspo")
    ran(tmp_path, "rlearner", "units", "quickstart", "run.name=lake", "--write", "units")
    assert [*(tmp_path / "units").rglob("*.service")]
    for program in ("rlearner", "broker", "envhub", "rewardhub", "rollout-server"):
        assert ran(tmp_path, program, "--version").startswith(f"{program} ")
        assert "usage" in ran(tmp_path, program, "--help")
    assert "complete" in ran(tmp_path, "rlearner", "completion")
