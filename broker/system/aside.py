"""Encodes and decodes large messages in a thread, so that the event loop stays responsive."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

# Decoding less takes no longer than switching threads.
ASIDE_FROM_BYTES: Final = 256 * 1024

T = TypeVar("T")

# One thread: more would not be faster under the GIL, and each keeps memory.
_thread: Final = ThreadPoolExecutor(1, thread_name_prefix="codec")


async def aside(num_bytes: int, work: Callable[[], T]) -> T:
    """Return the result of ``work``, run in the codec thread if it handles many bytes."""
    if num_bytes < ASIDE_FROM_BYTES:
        return work()
    return await asyncio.get_running_loop().run_in_executor(_thread, work)
