"""``make dist``: the same bytes in another folder, time zone and umask, and from the sdist; all
files are there, and the configurations are found where they are installed.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PACKAGES = set(PROJECT["tool"]["importlinter"]["root_packages"])
VERSION = PROJECT["project"]["version"]
# Packages of this environment, without its own install of rlearner: -S leaves out its .pth files.
LOCATE = """
import importlib.util, os, sys
installed, others = sys.argv[1:]
sys.path[:] = [installed, *sys.path[1:], others]
for name in os.listdir(installed):
    if name.startswith("__editable__") and name.endswith(".py"):
        importlib.import_module(name.removesuffix(".py")).install()
from broker.settings.config_file import locate, shipped_names
print(locate("configs/quickstart.yaml"))
print(locate("sokoban"))
print(*shipped_names())
print(*(name for name in ("configs", "bench", "tools") if importlib.util.find_spec(name)))
"""
BUILD_EDITABLE = "from setuptools import build_meta; build_meta.build_editable({!r})"


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
        f"{VERSION}-py3-none-any.whl",
        f"{VERSION}.tar.gz",
    ]
    unpacked = tmp_path / "another folder"
    with tarfile.open(first / f"rlearner-{VERSION}.tar.gz") as archive:
        assert {member.mtime for member in archive} == {int(commit_time(clone))}
        archive.extractall(unpacked, filter="data")
    assert (
        build(unpacked / f"rlearner-{VERSION}", tmp_path / "second", TZ="America/New_York") == found
    )
    files = {
        str(path.relative_to(unpacked / f"rlearner-{VERSION}"))
        for path in unpacked.rglob("*")
        if path.is_file()
    }
    assert committed() - files == set()
    assert {name for name in files - committed() if ".egg-info/" not in name} == {
        "PKG-INFO",
        "setup.cfg",
    }
    with zipfile.ZipFile(first / f"rlearner-{VERSION}-py3-none-any.whl") as wheel:
        names = set(wheel.namelist())
    assert {name for name in committed() if name.partition("/")[0] in PACKAGES} - names == set()
    configurations = {name for name in committed() if name.startswith("configs/")}
    assert {f"rlearner/{name}" for name in configurations} == {
        name for name in names if name.startswith("rlearner/configs/")
    }
    assert "rlearner/configs/quickstart.yaml" in names
    assert {name.partition("/")[0] for name in names} == {
        *PACKAGES,
        f"rlearner-{VERSION}.dist-info",
    }


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a clone")
@pytest.mark.parametrize("editable", [False, True], ids=["wheel", "editable"])
def test_configurations_are_found_from_any_folder(editable: bool, tmp_path: Path) -> None:
    clone, out, installed = tmp_path / "clone", tmp_path / "out", tmp_path / "installed"
    subprocess.run(["git", "clone", "-q", "--no-hardlinks", str(ROOT), str(clone)], check=True)
    if editable:
        command = [sys.executable, "-c", BUILD_EDITABLE.format(str(out))]
        subprocess.run(command, cwd=clone, capture_output=True, check=True)
    else:
        build(clone, out)
    (wheel,) = out.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)
    (tmp_path / "empty").mkdir()
    paths = [str(installed), sysconfig.get_path("purelib")]
    done = subprocess.run(
        [sys.executable, "-S", "-c", LOCATE, *paths],
        cwd=tmp_path / "empty",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    folder = clone / "configs" if editable else installed / "rlearner" / "configs"
    shipped = sorted(path.stem for path in (ROOT / "configs").glob("*.yaml"))
    assert done.stdout.splitlines() == [
        str(folder / "quickstart.yaml"),
        str(folder / "sokoban.yaml"),
        " ".join(shipped),
        "",
    ]


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
