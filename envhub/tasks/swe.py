"""Makes task folders of rows as SWE-bench has them, from local mirrors of their repositories.

A row has ``instance_id``, ``repo``, ``base_commit``, ``problem_statement``, ``test_patch``,
``FAIL_TO_PASS`` and ``PASS_TO_PASS`` (lists of pytest's node ids, or these as JSON), and perhaps
``patch``, which becomes the solution. The policy gets the files of the commit without their
history. The tests bring the files of the test patch, and put back every ``conftest.py`` and
``pytest.ini`` as it was; they run in the verifier's sandbox, in one process with the code of the
policy, which is what such a test means.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from broker.errors import DataError, UserError
from rlearner_text.atomic_folders import begin_folder, finish_folder

WORKDIR: Final = "/testbed"
COLUMNS: Final = ("instance_id", "repo", "base_commit", "problem_statement", "test_patch")
# hooks of pytest with which the policy could change the results
HOOKS: Final = ("conftest.py", "pytest.ini", "tox.ini")
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,200}")
_COMMIT: Final = re.compile(r"[0-9a-f]{7,64}")
TEST: Final = f"""#!/bin/sh
# Puts the hidden tests in their places and runs them.
cd {WORKDIR} || exit 1
find . \\( -name {HOOKS[0]} -o -name {HOOKS[1]} -o -name {HOOKS[2]} \\) -exec rm -f {{}} +
while read -r path; do rm -f "$path"; done < /tests/removed.txt
cp -R /tests/files/. {WORKDIR}/
exec python3 /tests/run_tests.py
"""
RUN_TESTS: Final = '''"""Runs the tests of a row with pytest; reward 1 if all pass that should."""

import json
import os
import subprocess
import sys

with open("/tests/tests.json", encoding="utf-8") as file:
    needed = json.load(file)
report = "/logs/verifier/outcomes.json"
command = [sys.executable, "-m", "pytest", "--rootdir", os.getcwd(), "-p", "outcomes"]
command += ["-p", "no:cacheprovider", "-q", *needed]
paths = ["/tests", *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
subprocess.run(command, env=environment)
try:
    with open(report, encoding="utf-8") as file:
        outcomes = json.load(file)
except (OSError, ValueError):
    outcomes = {}
failed = [name for name in needed if outcomes.get(name) != "passed"]
print("not passed:", *failed[:20])
with open("/logs/verifier/reward.txt", "w", encoding="utf-8") as file:
    file.write(str(int(not failed)))
'''
OUTCOMES: Final = '''"""A plug-in of pytest that writes the outcome of each test."""

import json

OUTCOMES = {}


def pytest_runtest_logreport(report):
    name = report.nodeid
    if report.when == "call":
        OUTCOMES.setdefault(name, report.outcome)
    elif report.failed:
        OUTCOMES[name] = "failed"


def pytest_sessionfinish(session):
    with open("/logs/verifier/outcomes.json", "w", encoding="utf-8") as file:
        json.dump(OUTCOMES, file)
'''


def write_swe_tasks(rows: Path, mirrors: Path, out: Path, image: str) -> list[Path]:
    """Write a task folder for each row and return them.

    Args:
        mirrors: folder with a clone of each repository as ``owner/name`` or ``owner__name``,
            bare (``.git``) or not.
        image: name of the image with Python and what the repositories need.

    Raises:
        DataError: names the line of a row that cannot become a task; those before it are written.
        UserError: if a folder cannot be written.
    """
    folders = []
    for line, row in _iter_rows(rows):
        try:
            folders.append(_write_task(row, mirrors, out, image))
        except _BadRowError as error:
            raise DataError(str(rows), line, str(error)) from None
        except OSError as error:
            raise UserError(f"{out}: {error.strerror or error}") from None
    if not folders:
        raise DataError(str(rows), 1, "the file holds no rows")
    return folders


class _BadRowError(Exception):
    """The row cannot become a task; says why in one line."""


def _iter_rows(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    for line, text in enumerate(data.split(b"\n"), start=1):
        if not text.strip():
            continue
        try:
            row = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise DataError(str(path), line, f"not a JSON object: {error}") from None
        if not isinstance(row, dict):
            raise DataError(str(path), line, "not a JSON object")
        missing = [name for name in COLUMNS if not isinstance(row.get(name), str)]
        if missing:
            raise DataError(str(path), line, f"no text in column {missing[0]!r}")
        yield line, row


def _write_task(row: Mapping[str, Any], mirrors: Path, out: Path, image: str) -> Path:
    name = str(row["instance_id"])
    if not _NAME.fullmatch(name):
        raise _BadRowError(f"instance_id {name!r:.80} cannot be the name of a folder")
    if not _COMMIT.fullmatch(row["base_commit"]):
        raise _BadRowError(f"base_commit {row['base_commit']!r:.80} is not a commit")
    needed = [*_read_tests(row, "FAIL_TO_PASS"), *_read_tests(row, "PASS_TO_PASS")]
    if not needed:
        raise _BadRowError("FAIL_TO_PASS is empty: nothing would be tested")
    mirror = _find_mirror(mirrors, row["repo"])
    folder = out / name
    if folder.exists():
        raise _BadRowError(f"{folder} exists already, and nothing is overwritten")
    draft = begin_folder(folder)
    try:
        repository = draft / "environment" / "repo"
        _check_out(mirror, row["base_commit"], repository)
        _write_tests(draft, repository, row["test_patch"], needed)
        (draft / "environment" / "Dockerfile").write_text(
            f"FROM {image}\nWORKDIR {WORKDIR}\nCOPY repo/ {WORKDIR}/\n", encoding="utf-8"
        )
        (draft / "instruction.md").write_text(_instruction_of(row), encoding="utf-8")
        (draft / "task.toml").write_text(_table_of(name), encoding="utf-8")
        if isinstance(row.get("patch"), str) and row["patch"].strip():
            _write_solution(draft, row["patch"])
        draft.chmod(0o755)
        finish_folder(draft, folder)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    return folder


def _read_tests(row: Mapping[str, Any], column: str) -> list[str]:
    value = row.get(column, [])
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            raise _BadRowError(f"{column} is neither a list nor JSON of one") from None
    if not isinstance(value, list) or not all(isinstance(test, str) for test in value):
        raise _BadRowError(f"{column} is not a list of tests")
    for test in value:
        if ".py::" not in test or test.startswith(("-", "/")) or ".." in test.split("::")[0]:
            raise _BadRowError(f"{column}: {test!r:.100} is not one of pytest's node ids")
    return value


def _find_mirror(mirrors: Path, repository: str) -> Path:
    flat = repository.replace("/", "__")
    if ".." in repository.split("/"):
        raise _BadRowError(f"repo {repository!r:.80} is not owner/name")
    for name in (repository, f"{repository}.git", flat, f"{flat}.git"):
        for path in (mirrors / name / ".git", mirrors / name):
            if (path / "objects").is_dir():
                return path
    raise _BadRowError(f"there is no clone of {repository} in {mirrors}: {repository} or {flat}")


def _run_git(command_name: str, *words: str, folder: str = ".", **variables: str) -> None:
    environment = {**os.environ, "GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": os.devnull}
    options = ["-C", folder, "-c", "core.hooksPath=/dev/null", "-c", "safe.directory=*"]
    command = ["git", *options, command_name, *words]
    result = subprocess.run(command, env=environment | variables, capture_output=True, text=True)
    if result.returncode:
        lines = result.stderr.strip().splitlines() or ["no output"]
        raise _BadRowError(f"git {command_name}: {lines[-1][:200]}")


def _check_out(mirror: Path, commit: str, target: Path) -> None:
    """Write the files of a commit, without history."""
    target.mkdir(parents=True)
    with tempfile.TemporaryDirectory(prefix="rlearner-swe-") as folder:
        variables = {"GIT_INDEX_FILE": f"{folder}/index", "GIT_DIR": str(mirror.absolute())}
        _run_git("read-tree", f"{commit}^{{commit}}", **variables)
        place = {**variables, "GIT_WORK_TREE": str(target.absolute())}
        _run_git("checkout-index", "--all", f"--prefix={target.absolute()}/", **place)


def _write_tests(draft: Path, repository: Path, patch: str, needed: list[str]) -> None:
    """Write the hidden tests: the files that the patch changes, and pytest's hooks as they were."""
    tests = draft / "tests"
    (tests / "files").mkdir(parents=True)
    for hook in HOOKS:
        for path in repository.rglob(hook):
            _copy_file(path, repository, tests / "files")
    with tempfile.TemporaryDirectory(prefix="rlearner-swe-") as folder:
        changed = Path(folder) / "repo"
        shutil.copytree(repository, changed, symlinks=True)
        file = Path(folder) / "test.patch"
        file.write_text(patch, encoding="utf-8")
        ceiling = {"GIT_CEILING_DIRECTORIES": folder, "GIT_DIR": f"{folder}/none"}
        _run_git("apply", "--whitespace=nowarn", str(file), folder=str(changed), **ceiling)
        removed = []
        for name in _patched_files(patch):
            if (changed / name).is_file():
                _copy_file(changed / name, changed, tests / "files")
            else:
                removed.append(name)
    (tests / "removed.txt").write_text("".join(f"{name}\n" for name in removed), encoding="utf-8")
    for name, text in {
        "test.sh": TEST,
        "run_tests.py": RUN_TESTS,
        "outcomes.py": OUTCOMES,
        "tests.json": json.dumps(needed),
    }.items():
        (tests / name).write_text(text, encoding="utf-8")
    (tests / "test.sh").chmod(0o755)


def _patched_files(patch: str) -> list[str]:
    names = re.findall(r"^(?:---|\+\+\+) [ab]/([^\t\n]+)", patch, re.MULTILINE)
    return [name for name in dict.fromkeys(names) if ".." not in Path(name).parts]


def _copy_file(path: Path, root: Path, target: Path) -> None:
    copy = target / path.relative_to(root)
    copy.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(path, copy, follow_symlinks=False)


def _write_solution(draft: Path, patch: str) -> None:
    solution = draft / "solution"
    solution.mkdir()
    (solution / "fix.patch").write_text(patch, encoding="utf-8")
    script = f"#!/bin/sh\ncd {WORKDIR} && patch -p1 < /solution/fix.patch\n"
    (solution / "solve.sh").write_text(script, encoding="utf-8")


def _instruction_of(row: Mapping[str, Any]) -> str:
    return (
        f"The folder {WORKDIR} has the source code of {row['repo']}. Solve the issue below by "
        f"changing that code; hidden tests will decide.\n\n{row['problem_statement'].strip()}\n"
    )


def _table_of(name: str) -> str:
    return f"""schema_version = "1.4"

[task]
name = {json.dumps(name)}

[agent]
timeout_sec = 1800.0

[verifier]
timeout_sec = 600.0
environment_mode = "separate"

[environment]
network_mode = "no-network"
workdir = "{WORKDIR}"
"""
