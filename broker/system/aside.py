"""Encoding and decoding of large messages in a thread, so that the event loop goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

ASIDE_FROM_BYTES: Final = 256 * 1024  # below, decoding takes less than a change of threads may

T = TypeVar("T")

# One thread: more would not be faster under the interpreter's lock, and each has memory of its own that it keeps.
_thread: Final = ThreadPoolExecutor(1, thread_name_prefix="codec")


async def aside(num_bytes: int, work: Callable[[], T]) -> T:
    """The result of ``work``, done in the codec thread where it concerns many bytes."""
    if num_bytes < ASIDE_FROM_BYTES:
        return work()
    return await asyncio.get_running_loop().run_in_executor(_thread, work)
