"""A process's own clock."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time

import pytest

from broker.errors import described, reason_of
from broker.system.work_clock import WorkClock


def test_clock_stands_still_while_its_observer_does() -> None:
    command = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]
    with subprocess.Popen(command) as child:
        clock = WorkClock(child.pid)
        time.sleep(0.3)
        assert clock.look(most_s=0.1) == pytest.approx(clock.wall_s - 0.1)
        assert clock.own_s == 0.1
        child.kill()


@pytest.mark.parametrize(
    "error", [TimeoutError(), asyncio.CancelledError(), ValueError("two\nlines")]
)
def test_each_error_has_a_reason(error: BaseException) -> None:
    assert reason_of(error) in ("TimeoutError", "CancelledError", "two lines")
    assert described(error) in ("TimeoutError", "CancelledError", "ValueError: two lines")
