"""The tutorials of docs/: their files are written and their lines run as they stand there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
from waits import LONG_S

PAGES = sorted((Path(__file__).parents[2] / "docs").glob("tutorial-*.md"))
FILE = re.compile(r"`([\w.]+)`:\n\n```\w+\n(.*?)```", re.DOTALL)
COMMAND = re.compile(r"^    \$ (.+)\n((?:    (?!\$).*\n)*)", re.MULTILINE)
MARK = "@@ line"


def run_lines(folder: Path, commands: list[str]) -> list[str]:
    """Run the commands in one shell, up to the first that fails; return the output of each."""
    script = "\n".join(f"echo '{MARK}'\n{command} || true" for command in commands)
    programs = str(Path(sys.executable).parent)
    environment = {
        **os.environ,
        "PATH": os.pathsep.join([programs, os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    done = subprocess.run(
        ["bash", "-u", "-c", script],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=6 * LONG_S,
    )
    return done.stdout.split(f"{MARK}\n")[1:]


def matches(output: str, expected: str) -> bool:
    """Return whether an output is as the page shows it; … stands for any text."""
    pattern = "\n".join(re.sub(r"([\[?*])", r"[\1]", line[4:]) for line in expected.splitlines())
    return fnmatchcase(output.strip(), pattern.replace("…", "*").strip())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_tutorial_runs_line_by_line(page: Path, tmp_path: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for name, content in FILE.findall(text):
        (tmp_path / name).write_text(content)
    lines = COMMAND.findall(text)
    outputs = run_lines(tmp_path, [command for command, _ in lines])
    assert len(outputs) == len(lines)
    for (command, expected), output in zip(lines, outputs, strict=True):
        assert matches(output, expected), f"{command}\n{output}"


def test_output_is_compared() -> None:
    assert matches("a b\nlast\n", "    a …\n    last\n")
    assert not matches("error: no\nlast\n", "    a …\n    last\n")
    assert not matches("a traceback\n", "")
