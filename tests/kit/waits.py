"""How long tests wait for what should happen: far longer than it takes on a busy machine, for a limit only ends a test
that hangs.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any, Final

import psutil

LONG_S: Final = 60.0


def runs(pid: int) -> bool:
    """Whether the process is there and no zombie; it may end while it is looked at."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


async def until(condition: Callable[[], Any], within_s: float = LONG_S) -> None:
    """Return once the condition holds; it may be a coroutine function.

    Raises:
        TimeoutError: it does not.
    """
    async with asyncio.timeout(within_s):
        while True:
            holds = condition()
            if await holds if inspect.isawaitable(holds) else holds:
                return
            await asyncio.sleep(0.02)
