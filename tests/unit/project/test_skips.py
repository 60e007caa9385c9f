"""The closing summary says what was skipped and why, and a session that has to exercise the sandbox
fails if it did not.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[2]
HOW = "there is no bubblewrap (bwrap) on PATH; run: apt-get install bubblewrap"
MARKED = "import pytest\n@pytest.mark.sandbox\n@pytest.mark.parametrize('number', range(3))\ndef test_marked(number): pass\n"
OTHERS = "import pytest\ndef test_other(): pass\ndef test_skipped(): pytest.skip('no GPU')\n"
WORKS = "import skips\nskips.lacking = lambda: ''\n"


def session(
    folder: Path, body: str, *options: str, path: str = "/nowhere", require: bool = False
) -> tuple[int, str]:
    """Run pytest on a file of tests without bubblewrap on PATH. Return its exit code and what it
    printed.
    """
    (folder / "test_it.py").write_text(body)
    environment = {
        **os.environ,
        "PATH": path,
        "PYTHONPATH": f"{TESTS / 'kit'}:{TESTS.parent}",
        "RL_REQUIRE_SANDBOX": str(int(require)),
    }
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "skips",
        "-p",
        "no:cacheprovider",
        "-q",
        "--rootdir",
        str(folder),
        *options,
        str(folder),
    ]
    done = subprocess.run(
        command,
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("options", [(), ("-n", "2")])
def test_the_summary_counts_each_reason_once(tmp_path: Path, options: tuple[str, ...]) -> None:
    code, said = session(tmp_path, MARKED + OTHERS, *options)
    assert code == 0, said
    assert f"    3  {HOW}\n    1  no GPU\n" in said
    assert said.count(HOW) == 1
    assert "1 passed, 4 skipped" in said


def test_a_session_that_needs_the_sandbox_fails_at_once_without_it(tmp_path: Path) -> None:
    code, said = session(tmp_path, MARKED + OTHERS, require=True)
    assert code == 1
    assert f"RL_REQUIRE_SANDBOX=1: {HOW}" in said
    assert "passed" not in said


@pytest.mark.parametrize("options", [(), ("-n", "2")])
def test_a_session_that_needs_the_sandbox_fails_if_none_of_its_tests_ran(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    (tmp_path / "conftest.py").write_text(WORKS)
    code, said = session(tmp_path, OTHERS, *options, require=True)
    assert code == 1, said
    assert "no test of the sandbox passed" in said
    code, said = session(tmp_path, MARKED + OTHERS, *options, require=True)
    assert code == 0, said
    assert "4 passed, 1 skipped" in said
