"""``rlearner new``: projects of each kind pass their own tests, and train."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from waits import LONG_S

from learner.reporting.metrics import read_lines
from rlearner.cli import main
from rlearner.new.cli import KINDS

COMMON = {"digits.yaml", "test_project.py", "README.md", ".gitignore"}
FILES = {
    "game": COMMON | {"environment.py", "reward.py"},
    "qa": COMMON | {"questions.jsonl", "reward.py"},
    "tools": COMMON | {"environment.py", "reward.py"},
    "agent": COMMON | {"agent.py"},
    "terminal": COMMON,
}
FOLDERS = {"terminal": {"tasks/"}}
PASSED = {"game": 4, "qa": 7, "tools": 11, "agent": 22, "terminal": 43}
Make = Callable[[str], Path]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Makes a project of a kind in an empty folder, by the command."""

    @cache
    def project(kind: str) -> Path:
        here = tmp_path_factory.mktemp(kind)
        words = [] if kind == "game" else ["--kind", kind]  # the default
        done = ran(here, "-m", "rlearner.cli", "new", "digits", *words, "--json")
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        files = FILES[kind] | FOLDERS.get(kind, set())
        assert (found["folder"], set(found["files"])) == (str(here / "digits"), files)
        return here / "digits"

    return project


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


def test_every_kind_is_tried_here() -> None:
    assert set(KINDS) == set(FILES) == set(PASSED)


@pytest.mark.parametrize("kind", FILES)
def test_its_files_name_it_and_its_own_tests_pass(kind: str, make: Make) -> None:
    project = make(kind)
    files = [path for path in project.iterdir() if path.is_file()]
    assert {path.name for path in files} == FILES[kind]
    assert [path for path in files if "@name@" in path.read_text()] == []
    assert "rlearner up digits.yaml" in (project / "README.md").read_text()
    done = ran(project, "-m", "pytest", "-q", "-p", "no:cacheprovider")
    assert done.returncode == 0, done.stdout
    assert re.search(rf"^{PASSED[kind]} passed", done.stdout, re.MULTILINE)


@pytest.mark.parametrize(
    ("kind", "file", "right", "wrong", "failed"),
    [
        ("game", "reward.py", "sample.num_turns", "sample.turns", 1),
        ("qa", "reward.py", ".lower() ==", " ==", 1),
        ("tools", "environment.py", "valid=False, metrics", "metrics", 1),
        ("agent", "agent.py", '"Higher."', '"Up."', 16),
    ],
)
def test_what_a_user_breaks_fails_its_tests(
    kind: str, file: str, right: str, wrong: str, failed: int, make: Make, tmp_path: Path
) -> None:
    for name in FILES[kind]:
        text = (make(kind) / name).read_text()
        (tmp_path / name).write_text(text.replace(right, wrong) if name == file else text)
    done = ran(tmp_path, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "not valid")
    assert done.returncode == 1
    assert re.search(rf"^{failed} failed", done.stdout, re.MULTILINE), done.stdout


@pytest.mark.parametrize(
    ("kind", "quick", "metric"),
    [
        ("game", ["warm_start.steps=2"], "reward_parts/quick/turns/mean"),
        ("qa", ["warm_start.steps=2", "algorithm.filter_zero_variance=false"], "reward_parts/right/mean"),
        ("tools", ["warm_start.steps=100", "algorithm.filter_zero_variance=false"], "env/calls"),
        ("agent", ["algorithm.filter_zero_variance=false"], "env/guesses"),
    ],
)  # fmt: skip
def test_it_trains_from_any_folder(kind: str, quick: list[str], metric: str, make: Make) -> None:
    folder = make(kind).parent
    words = ["run.name=first", "train.steps=2", "eval.every_steps=0", "train.groups_per_step=2"]
    done = ran(folder, "-m", "rlearner.cli", "up", "digits/digits.yaml", *words, *quick)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = read_lines(folder / "runs" / "first" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2]
    assert metric in rows[-1]
    if kind == "game":
        assert rows[-1][metric] < 0
    if kind == "tools":
        assert all(row[metric] > 0 and row["actor/grad_norm"] > 0 for row in rows)


def test_an_unknown_kind_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["new", "digits", "--kind", "chess"])
    assert ended.value.code == 2
    assert "invalid choice: 'chess' (choose from" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


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
    def full(folder: Path, name: str, kind: str) -> list[str]:
        (folder / "half.py").write_text("#")
        raise OSError(28, "No space left on device")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("rlearner.new.cli.write_project", full)
    assert main(["new", "mine"]) == 2
    assert capsys.readouterr().err == "error: mine: No space left on device\n"
    assert list(tmp_path.iterdir()) == []
