"""A test that fails once and passes when it is run again does not stop a session; it is shown, and
too many of them do.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from test_skips import session

BODY = """
import pathlib, pytest
@pytest.mark.parametrize("number", range({unstable}))
def test_race(number):
    seen = pathlib.Path(__file__).with_name(f"seen-{{number}}")
    was = seen.exists()
    seen.touch()
    assert was, f"the race of {{number}}"
def test_wrong(): assert {right}
"""


@pytest.mark.parametrize("more", [(), ("-n", "2")])
@pytest.mark.parametrize(
    ("unstable", "right", "code", "said"),
    [
        (2, True, 0, "3 passed, 2 rerun"),
        (4, True, 1, "4 unstable tests, more than 3: the session fails"),
        (1, False, 1, "1 failed, 1 passed, 2 rerun"),
    ],
)
def test_what_is_unstable_is_shown(
    tmp_path: Path, more: tuple[str, ...], unstable: int, right: bool, code: int, said: str
) -> None:
    body = BODY.format(unstable=unstable, right=right)
    ended, shown = session(tmp_path, body, "-p", "reruns", "--reruns", "1", *more)
    assert (ended, said in shown) == (code, True), shown
    assert all(f"AssertionError: the race of {number}" in shown for number in range(unstable))
