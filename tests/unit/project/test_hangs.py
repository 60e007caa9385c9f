"""A test that swallows its time limit does not hang its session."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_skips import session

BODY = """
import asyncio, time, hangs, pytest
hangs.GRACE_S = 1.0
@pytest.mark.timeout(1)
def test_hangs():
    async def wait(): await asyncio.Event().wait()
    async def busy():
        while True:
            time.sleep(0.1)
            await asyncio.sleep(0)
    async def both():
        task = asyncio.create_task(busy())
        await wait()
    asyncio.run(both())
def test_next(): assert True
"""


@pytest.mark.parametrize(
    "more", [(), ("-p", "reruns", "--reruns", "1", "--rerun-except", "pytest-timeout")]
)
def test_a_test_that_swallows_its_time_limit_fails_alone(
    tmp_path: Path, more: tuple[str, ...]
) -> None:
    ended, shown = session(tmp_path, BODY, "-p", "hangs", "-n", "1", "--timeout", "60", *more)
    assert (ended, "1 failed, 1 passed" in shown) == (1, True), shown
    assert "crashed while running 'test_it.py::test_hangs'" in shown
    assert "line 14 in test_hangs" in shown  # the stacks
