"""The suites of a night: which there are, shards, going on after an interruption, wrong names."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / ".ci" / "nightly"
# of test-* targets: it runs tests of make test on a loaded machine, longer than a night's shard
NOT_NIGHTLY = {"test-loaded"}


def suites() -> list[str]:
    (words,) = re.findall(r"^suites=\(([^)]*)\)", SCRIPT.read_text(encoding="utf-8"), re.MULTILINE)
    return str(words).split()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A repository with the script, and a make that notes what it is asked for."""
    (tmp_path / ".ci").mkdir()
    (tmp_path / ".ci" / "nightly").write_bytes(SCRIPT.read_bytes())
    (tmp_path / "bin").mkdir()
    make = tmp_path / "bin" / "make"
    make.write_text(
        f'#!/bin/sh\necho "$1" >> {tmp_path}/asked\necho output of "$1"\ntest "$1" != "$BAD"\n'
    )
    make.chmod(0o755)
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    (tmp_path / "code.py").touch()
    commit = [*identity, "commit", "-q", "-m", "first"]
    for words in (["init", "-q"], ["add", "code.py"], commit):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    return tmp_path


def run(folder: Path, *words: str, **variables: str) -> tuple[int, str, list[str]]:
    """Return the exit code, the output, and the suites that make was asked for."""
    (folder / "asked").unlink(missing_ok=True)
    path = f"{folder}/bin:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", ".ci/nightly", *words], cwd=folder, env={**os.environ, **variables, "PATH": path},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    asked = (folder / "asked").read_text().split() if (folder / "asked").exists() else []
    return done.returncode, done.stdout + done.stderr, asked


def result(output: str) -> Any:
    return json.loads(output.strip().splitlines()[-1])


def test_every_optional_suite_is_one_of_the_night() -> None:
    rules = (ROOT / "optional.mk").read_text(encoding="utf-8")
    targets = set(re.findall(r"^(test-[\w-]*|chaos|hosts|nodes):", rules, re.MULTILINE))
    listed = suites()
    assert targets - NOT_NIGHTLY == {name for name in listed if not name.startswith("families")}
    assert len(set(listed)) == len(listed)


def test_it_goes_on_with_what_has_not_passed(folder: Path) -> None:
    code, output, asked = run(folder, BAD="hosts")
    assert (code, asked) == (1, suites())
    assert result(output) == {"passed": [s for s in suites() if s != "hosts"], "failed": ["hosts"]}
    assert "output of hosts" in output
    code, output, asked = run(folder)
    assert (code, asked) == (0, ["hosts"])
    assert result(output)["passed"] == suites()
    assert run(folder, "hosts")[2] == []
    assert run(folder, "hosts", AGAIN="1")[2] == ["hosts"]
    (folder / "code.py").write_text("changed")
    assert run(folder, "hosts")[2] == ["hosts"]


def test_shards_are_disjoint_and_all(folder: Path) -> None:
    parts = [run(folder, f"{shard}/3")[2] for shard in (1, 2, 3)]
    assert sorted(suite for part in parts for suite in part) == sorted(suites())
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("0/3",), "error: shard: 0/3 is not allowed; 1/3 to 3/3"),
        (("4/3",), "error: shard: 4/3 is not allowed; 1/3 to 3/3"),
        (("hosts", "test"), "error: suite: 'test' is not allowed; one of "),
    ],
)
def test_what_does_not_exist_is_refused(words: tuple[str, ...], line: str, folder: Path) -> None:
    code, output, asked = run(folder, *words)
    assert (code, asked) == (2, [])
    assert output.startswith(line)
    assert output.count("\n") == 1
