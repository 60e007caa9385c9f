"""How long tests wait for what should happen: far longer than it takes on a busy machine, for a
limit only ends a test that hangs. RL_TEST_PATIENCE multiplies the limits of the clock, which `make
test-loaded` sets.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import time
from collections.abc import Callable
from typing import Any, Final

import psutil

from broker.system.work_clock import WorkClock

LONG_S: Final = 60.0 * float(os.environ.get("RL_TEST_PATIENCE", "1"))
LOOK_EVERY_S: Final = 1.0


def runs(pid: int) -> bool:
    """Whether the process is there and no zombie; it may end while it is looked at."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


async def until(condition: Callable[[], Any], within_s: float = LONG_S) -> None:
    """Return once the condition holds; it may be a coroutine function.

    Args:
        within_s: on the clock of this process and those that it started, which stands still while
            they wait for a processor.

    Raises:
        TimeoutError: it does not.
    """
    clock, looked_at = WorkClock(os.getpid()), time.monotonic()
    while True:
        holds = condition()
        if await holds if inspect.isawaitable(holds) else holds:
            return
        if time.monotonic() > looked_at + min(LOOK_EVERY_S, within_s / 10):
            looked_at = time.monotonic()
            clock.look()
            if clock.own_s > within_s:
                raise TimeoutError(f"the condition does not hold after {clock}")
        await asyncio.sleep(0.02)
