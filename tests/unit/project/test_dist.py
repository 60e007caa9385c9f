"""``make dist``: the same bytes in another folder, time zone and umask, and from the sdist; all
files are there.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PACKAGES = {
    "broker",
    "learner",
    "rlearner",
    "rollout",
    "envhub",
    "rewardhub",
    "rlearner_text",
    "rlearner_sandbox",
}


def build(folder: Path, out: Path, **environment: str) -> dict[str, str]:
    """Return the sha256 of each file that ``dist.py`` of a folder builds."""
    command = [sys.executable, "requirements/dist.py", str(out)]
    done = subprocess.run(
        command,
        cwd=folder,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
        umask=0o077,
    )
    assert done.returncode == 0, done.stderr
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in out.iterdir()}


def committed() -> set[str]:
    done = subprocess.run(
        ["git", "-C", str(ROOT), "ls-tree", "-r", "--name-only", "HEAD"],
        capture_output=True,
        text=True,
        check=True,
    )
    return set(done.stdout.splitlines())


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a clone")
def test_the_same_bytes_from_a_clone_and_from_the_sdist_and_all_files(tmp_path: Path) -> None:
    clone, first = tmp_path / "a" / "clone", tmp_path / "first"
    subprocess.run(["git", "clone", "-q", "--no-hardlinks", str(ROOT), str(clone)], check=True)
    found = build(clone, first, TZ="Asia/Tokyo", LC_ALL="C")
    assert sorted(name.partition("-")[2] for name in found) == [
        "0.1.0-py3-none-any.whl",
        "0.1.0.tar.gz",
    ]
    unpacked = tmp_path / "another folder"
    with tarfile.open(first / "rlearner-0.1.0.tar.gz") as archive:
        assert {member.mtime for member in archive} == {int(commit_time(clone))}
        archive.extractall(unpacked, filter="data")
    assert build(unpacked / "rlearner-0.1.0", tmp_path / "second", TZ="America/New_York") == found
    files = {
        str(path.relative_to(unpacked / "rlearner-0.1.0"))
        for path in unpacked.rglob("*")
        if path.is_file()
    }
    assert committed() - files == set()
    assert {name for name in files - committed() if ".egg-info/" not in name} == {
        "PKG-INFO",
        "setup.cfg",
    }
    with zipfile.ZipFile(first / "rlearner-0.1.0-py3-none-any.whl") as wheel:
        names = set(wheel.namelist())
    assert {name for name in committed() if name.partition("/")[0] in PACKAGES} - names == set()
    assert {name.partition("/")[0] for name in names} == {*PACKAGES, "rlearner-0.1.0.dist-info"}


def commit_time(clone: Path) -> str:
    return subprocess.run(
        ["git", "-C", str(clone), "log", "-1", "--format=%ct"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout


def test_neither_a_clone_nor_an_sdist_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "requirements").mkdir()
    (tmp_path / "requirements" / "dist.py").write_text(
        (ROOT / "requirements" / "dist.py").read_text()
    )
    done = subprocess.run(
        [sys.executable, "requirements/dist.py", str(tmp_path / "out")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (
        1,
        f"error: {tmp_path} is neither a clone nor an unpacked sdist\n",
    )
