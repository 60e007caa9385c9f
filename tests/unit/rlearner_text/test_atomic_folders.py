"""A folder that is being replaced always exists and is complete, even after a kill."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlearner_text import atomic_folders
from rlearner_text.atomic_folders import atomic_folder

ROOT = Path(__file__).parents[3]
REPLACES = """
import sys
from rlearner_text.atomic_folders import atomic_folder
number = 0
while True:
    number += 1
    with atomic_folder(sys.argv[1]) as folder:
        for name in "abc":
            (folder / name).write_text(str(number))
    print(number, flush=True)
"""


def content(folder: Path) -> set[str]:
    return {(folder / name).read_text() for name in "abc"}


def test_a_reader_always_finds_one_whole_folder(tmp_path: Path) -> None:
    target, seen = tmp_path / "model", set[str]()
    with subprocess.Popen(
        [sys.executable, "-c", REPLACES, str(target)], cwd=ROOT, stdout=subprocess.PIPE
    ) as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        ends = time.monotonic() + 3
        while time.monotonic() < ends:
            assert target.is_dir()
            try:
                found = content(target)
            except FileNotFoundError:  # it was replaced while its files were opened
                continue
            seen |= found
        writer.kill()
    assert len(seen) > 3


def test_a_kill_at_any_moment_leaves_one_whole_folder(tmp_path: Path) -> None:
    target = tmp_path / "model"
    for _ in range(20):
        with subprocess.Popen(
            [sys.executable, "-c", REPLACES, str(target)], cwd=ROOT, stdout=subprocess.PIPE
        ) as writer:
            assert writer.stdout is not None
            writer.stdout.readline()
            time.sleep(random.uniform(0, 0.02))
            writer.kill()
        assert len(content(target)) == 1


def test_a_file_system_that_cannot_swap_gets_two_renames(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cannot(one: Path, other: Path) -> None:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(atomic_folders, "exchange", cannot)
    for text in ("1", "2"):
        with atomic_folder(tmp_path / "model") as folder:
            (folder / "a").write_text(text)
    assert (tmp_path / "model" / "a").read_text() == "2"
    assert [file.name for file in tmp_path.iterdir()] == ["model"]
