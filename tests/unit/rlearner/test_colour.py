"""Colours of the terminal: on one unless NO_COLOR, elsewhere only with FORCE_COLOR, and never in
JSON.
"""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

# of text or ground
COLOUR = re.compile(r"\x1b\[(?:\d+;)*(?:3[0-8]|4[0-8]|9[0-7]|10[0-7])(?:;\d+)*m")
ANY = re.compile(r"\x1b\[")
UNSET = ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLORTERM")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "r" / "logs").mkdir(parents=True)
    (tmp_path / "r" / "config.yaml").write_text(
        yaml.safe_dump({"run": {"name": "r"}, "train": {"steps": 3}})
    )
    line = "2026-11-25 12:00:00.000 ERROR r envhub envhub-1 it broke\n"
    (tmp_path / "r" / "logs" / "envhub.log").write_text(line)
    return tmp_path


def shown(command: list[str], environment: dict[str, str], *, terminal: bool) -> str:
    """Return what a command prints, on a terminal or into a pipe."""
    env = {name: value for name, value in os.environ.items() if name not in UNSET} | {
        "TERM": "xterm-256color"
    }
    words = [sys.executable, "-m", "rlearner.cli", *command]
    if not terminal:
        return subprocess.run(
            words, env=env | environment, capture_output=True, text=True, check=True
        ).stdout
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        words, env=env | environment, stdout=theirs, stderr=subprocess.DEVNULL
    ) as child:
        os.close(theirs)
        data = b""
        while True:
            try:
                part = os.read(ours, 65536)
            except OSError:  # the other end is closed
                break
            if not part:
                break
            data += part
    os.close(ours)
    assert child.returncode == 0
    return data.decode()


@pytest.mark.parametrize(
    ("environment", "terminal", "coloured"),
    [
        ({}, True, True),
        ({}, False, False),
        ({"NO_COLOR": "1"}, True, False),
        ({"NO_COLOR": ""}, True, True),  # as no-color.org has it: only when it is not empty
        ({"FORCE_COLOR": "1"}, False, True),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, False, False),
        ({"TERM": "dumb"}, True, False),
    ],
)
def test_colours_follow_the_conventions(
    run: Path, environment: dict[str, str], terminal: bool, coloured: bool
) -> None:
    text = shown(["logs", "r", "--dir", str(run)], environment, terminal=terminal)
    assert "it broke" in text
    assert bool(COLOUR.search(text)) == coloured


@pytest.mark.parametrize(
    "command", [["logs", "r", "--json", "--dir"], ["runs", "--json"], ["diff", "r", "r", "--dir"]]
)
def test_json_and_plain_text_have_no_escapes_at_all(run: Path, command: list[str]) -> None:
    assert ANY.search(shown([*command, str(run)], {"FORCE_COLOR": "1"}, terminal=False)) is None


def test_the_table_of_runs_is_bold_not_coloured(run: Path) -> None:
    text = shown(["runs", str(run)], {"NO_COLOR": "1"}, terminal=True)
    assert "stopped" in text
    assert COLOUR.search(text) is None
