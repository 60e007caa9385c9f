"""What make setup does about bubblewrap, with an apt-get of our own: the script installs it where
it may, or says how.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "requirements/bubblewrap.sh"
HINT = "bubblewrap is not installed, so tests of the sandbox are skipped; as root run: apt-get install bubblewrap"
INSTALLS = 'case "$*" in *install*) : > "$PATH/bwrap"; /bin/chmod +x "$PATH/bwrap";; esac'


def script(
    folder: Path, apt_get: str | None, user: int = 0, present: bool = False
) -> tuple[list[str], list[str]]:
    """Run the script with a PATH of its own. Return the lines that it printed and the calls of
    apt-get.
    """
    calls = folder / "calls"
    programs = {
        "id": f"echo {user}",
        "apt-get": apt_get and f'echo "$DEBIAN_FRONTEND $*" >> {calls}\n{apt_get}',
        "bwrap": "" if present else None,
    }
    for name, body in programs.items():
        if body is not None:
            (folder / name).write_text(f"#!/bin/sh\n{body}\n")
            (folder / name).chmod(0o755)
    done = subprocess.run(
        ["/bin/sh", SCRIPT],
        env={"PATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines(), calls.read_text().splitlines() if calls.exists() else []


def test_it_is_installed_by_root(tmp_path: Path) -> None:
    said, calls = script(tmp_path, INSTALLS)
    assert said == ["installing bubblewrap, the sandbox for programs that a policy writes"]
    assert [call.split()[-1] for call in calls] == ["update", "bubblewrap"]
    assert all(call.startswith("noninteractive ") for call in calls)
    assert " -y " in calls[1]


def test_nothing_is_done_where_it_is(tmp_path: Path) -> None:
    assert script(tmp_path, INSTALLS, present=True) == ([], [])


@pytest.mark.parametrize(("apt_get", "user"), [(INSTALLS, 1000), (None, 0)])
def test_others_are_told_how(tmp_path: Path, apt_get: str | None, user: int) -> None:
    assert script(tmp_path, apt_get, user) == ([HINT], [])


def test_a_failure_is_tolerated(tmp_path: Path) -> None:
    said, calls = script(tmp_path, "echo E: no network >&2; exit 100")
    assert (said[1:], len(calls)) == ([HINT], 2)
