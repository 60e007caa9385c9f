"""``rlearner new``: the project that it writes passes its own tests, and trains."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from waits import LONG_S

from learner.reporting.metrics import read_lines
from rlearner.cli import main

FILES = {"digits.yaml", "environment.py", "reward.py", "test_project.py", "README.md", ".gitignore"}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project in an empty folder, made by the command."""
    here = tmp_path_factory.mktemp("projects")
    done = ran(here, "-m", "rlearner.cli", "new", "digits", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["folder"], set(found["files"])) == (str(here / "digits"), FILES)
    return here / "digits"


def ran(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=3 * LONG_S,
    )


def test_its_files_name_it_and_its_own_tests_pass(project: Path) -> None:
    assert {path.name for path in project.iterdir() if path.is_file()} == FILES
    assert not [
        path for path in project.iterdir() if path.is_file() and "@name@" in path.read_text()
    ]
    assert "rlearner up digits.yaml" in (project / "README.md").read_text()
    done = ran(project, "-m", "pytest", "-q", "-p", "no:cacheprovider")
    assert done.returncode == 0, done.stdout
    assert re.search(r"^4 passed", done.stdout, re.MULTILINE)


def test_a_broken_reward_fails_its_tests(project: Path, tmp_path: Path) -> None:
    """So that a user who breaks it learns of it."""
    for name in FILES:
        text = (project / name).read_text()
        (tmp_path / name).write_text(text.replace("sample.num_turns", "sample.turns"))
    done = ran(tmp_path, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "turn")
    assert done.returncode == 1
    assert re.search(r"^1 failed, 3 deselected", done.stdout, re.MULTILINE), done.stdout


def test_it_trains_from_any_folder(project: Path) -> None:
    quick = [
        "run.name=first",
        "warm_start.steps=2",
        "eval.every_steps=0",
        "train.groups_per_step=2",
    ]
    done = ran(
        project.parent, "-m", "rlearner.cli", "up", "digits/digits.yaml", "train.steps=2", *quick
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = read_lines(project.parent / "runs" / "first" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2]
    assert rows[-1]["reward_parts/quick/turns/mean"] < 0


@pytest.mark.parametrize("name", ["a b", "../up", "", ".", "a/b", "näh", "x" * 65])
def test_names_with_other_characters_are_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["new", name]) == 2
    assert (
        capsys.readouterr().err
        == f"error: NAME: {name!r} is not allowed; use 1-64 letters, digits, '_' or '-'\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "file").write_text("mine")
    for name in ("mine", "file"):
        assert main(["new", name]) == 2
        said = f"error: {name}: exists already, and nothing is overwritten; choose another name\n"
        assert capsys.readouterr().err == said
    assert list((tmp_path / "mine").iterdir()) == []
    assert (tmp_path / "file").read_text() == "mine"


def test_a_write_that_fails_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(folder: Path, name: str) -> list[str]:
        (folder / "half.py").write_text("#")
        raise OSError(28, "No space left on device")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("rlearner.new.cli.write_project", full)
    assert main(["new", "mine"]) == 2
    assert capsys.readouterr().err == "error: mine: No space left on device\n"
    assert list(tmp_path.iterdir()) == []
