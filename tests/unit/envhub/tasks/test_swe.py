"""SWE rows become tasks from a local mirror: the solution gets 1, the unchanged code and a policy
that rewrites the tests or pytest's hooks get 0.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest
from task_kit import task_args

from broker.errors import DataError
from envhub.tasks.folder import read_task
from envhub.tasks.host import TaskHost
from envhub.tasks.providers import load_provider
from envhub.tasks.splits import check_tasks
from envhub.tasks.swe import write_swe_tasks
from envhub.tasks.trial import Trial

# pytest and what it imports, which the image of a real task holds
VENDORED = ("pytest", "py", "_pytest", "pluggy", "iniconfig", "packaging", "pygments")
TEST = "from calc import double, triple\n\n\ndef test_double():\n    assert double(4) == 8\n"
HIDDEN = TEST + "\n\ndef test_triple():\n    assert triple(4) == 12\n"


def run_git(folder: Path, *words: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    command = ["git", *identity, "-C", str(folder), *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def diff_of(folder: Path) -> str:
    return run_git(folder, "diff") + "\n"


@pytest.fixture
def mirrors(tmp_path: Path) -> Path:
    return tmp_path / "mirrors"


@pytest.fixture
def row(mirrors: Path) -> dict[str, object]:
    """A row whose fix adds a factor, from a repository with a history."""
    folder = mirrors / "org" / "calc"
    folder.mkdir(parents=True)
    run_git(folder, "init", "-q")
    (folder / "calc.py").write_text(
        "def double(n):\n    return 2 * n\n\n\ndef triple(n):\n    return 2 * n\n"
    )
    (folder / "tests").mkdir()
    (folder / "tests" / "test_calc.py").write_text(TEST)
    (folder / "run.sh").write_text("true\n")
    (folder / "run.sh").chmod(0o755)
    (folder / "link.py").symlink_to("calc.py")
    (folder / ".gitattributes").write_text("tests export-ignore\n")
    run_git(folder, "add", "-A")
    run_git(folder, "commit", "-qm", "base")
    base = run_git(folder, "rev-parse", "HEAD")
    (folder / "tests" / "test_calc.py").write_text(HIDDEN)
    test_patch = diff_of(folder)
    run_git(folder, "checkout", "-q", ".")
    (folder / "calc.py").write_text(
        "def double(n):\n    return 2 * n\n\n\ndef triple(n):\n    return 3 * n\n"
    )
    patch = diff_of(folder)
    run_git(folder, "commit", "-qam", "fix")
    return {
        "instance_id": "org__calc-1",
        "repo": "org/calc",
        "base_commit": base,
        "problem_statement": "triple(4) is 8.",
        "test_patch": test_patch,
        "patch": patch,
        "FAIL_TO_PASS": json.dumps(["tests/test_calc.py::test_triple"]),
        "PASS_TO_PASS": ["tests/test_calc.py::test_double"],
    }


def write_rows(folder: Path, *rows: object) -> Path:
    file = folder / "rows.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return file


def test_files_are_those_of_the_commit(
    tmp_path: Path, mirrors: Path, row: dict[str, object]
) -> None:
    file = write_rows(tmp_path, row)
    (folder,) = write_swe_tasks(file, mirrors, tmp_path / "out", "python:3.11")
    repository = folder / "environment" / "repo"
    assert "return 2 * n\n\n\ndef triple(n):\n    return 2" in (repository / "calc.py").read_text()
    assert (repository / "tests" / "test_calc.py").read_text() == TEST
    assert not (repository / ".git").exists()
    assert (repository / "link.py").is_symlink()
    assert (repository / "run.sh").stat().st_mode & 0o111
    assert (folder / "tests/files/tests/test_calc.py").read_text() == HIDDEN
    assert "triple(4) is 8." in (folder / "instruction.md").read_text()
    check_tasks(task_args(tmp_path / "out"))
    with pytest.raises(DataError, match="exists already, and nothing is overwritten"):
        write_swe_tasks(file, mirrors, tmp_path / "out", "x")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"base_commit": "f" * 40}, ":2: git read-tree: "),
        ({"base_commit": "--upload-pack=x"}, ":2: base_commit '--upload-pack=x' is not a commit"),
        ({"repo": "org/none"}, ":2: there is no clone of org/none in "),
        ({"repo": "../x"}, ":2: repo '../x' is not owner/name"),
        ({"instance_id": "../x"}, ":2: instance_id '../x' cannot be the name of a folder"),
        ({"test_patch": "nonsense"}, ":2: git apply: "),
        ({"FAIL_TO_PASS": [], "PASS_TO_PASS": []}, ":2: FAIL_TO_PASS is empty"),
        ({"FAIL_TO_PASS": "[1]"}, ":2: FAIL_TO_PASS is not a list of tests"),
        ({"FAIL_TO_PASS": ["test_x (a.B)"]}, ":2: FAIL_TO_PASS: 'test_x (a.B)' is not one of pyt"),
        ({"FAIL_TO_PASS": ["-p x.py::y"]}, "is not one of pytest's node ids"),
        ({"problem_statement": None}, ":2: no text in column 'problem_statement'"),
    ],
)
def test_bad_rows_are_refused(
    tmp_path: Path,
    mirrors: Path,
    row: dict[str, object],
    change: dict[str, object],
    expected: str,
) -> None:
    file = write_rows(tmp_path, row, {**row, "instance_id": "second", **change})
    with pytest.raises(DataError) as caught:
        write_swe_tasks(file, mirrors, tmp_path / "out", "x")
    assert expected in str(caught.value)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["org__calc-1"]


@pytest.mark.sandbox
async def test_rewards_of_rows(tmp_path: Path, mirrors: Path, row: dict[str, object]) -> None:
    (folder,) = write_swe_tasks(write_rows(tmp_path, row), mirrors, tmp_path / "out", "x")
    for name in VENDORED:
        spec = find_spec(name)
        assert spec is not None
        assert spec.origin is not None
        source = Path(spec.origin).parent
        shutil.copytree(source, folder / "environment" / "repo" / name) if (
            source.name == name
        ) else shutil.copy(spec.origin, folder / "environment" / "repo")
    read_task.cache_clear()
    args = task_args(folder, provider_args={"folder": str(tmp_path / "sandboxes")})
    host = TaskHost(load_provider(args))

    async def play(command: str | None) -> float:
        trial = Trial(host, read_task(folder), args)
        try:
            await trial.begin()
            if command is None:
                await trial.run_solution()
            else:
                await trial.run(command, 10.0, max_output=1000)
            await trial.grade()
            assert trial.problems == {}
            print(trial.output)
            return trial.rewards()["reward"]
        finally:
            await trial.close()

    hook = "def pytest_runtest_makereport(item, call):\n    pass\n"
    hook = f"printf '%s' '{hook}' > conftest.py; cp conftest.py tests/conftest.py"
    try:
        assert await play(None) == 1.0
        assert await play("true") == 0.0
        assert await play("echo 'def test_triple(): pass' > tests/test_calc.py") == 0.0
        assert await play(hook) == 0.0
        assert await play("printf '[pytest]\\naddopts = --co\\n' > pytest.ini") == 0.0
    finally:
        await host.close()
