"""A long pull that ends early when there is a reason to."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any, Final

from broker.jetstream.delivery import Delivery
from broker.jetstream.work_queue import WorkQueue

LONG_PULL_S: Final = 30.0  # an idle process asks each of its queues this often
# the answer of a broker that has messages comes sooner; given up before, a pull would cross with them
LEAST_PULL_S: Final = 0.2


async def fetch_unless(queue: WorkQueue, limit: int, *reasons: Coroutine[Any, Any, object]) -> list[Delivery]:
    """Up to ``limit`` messages; an empty list after 30 s, or soon after one of the reasons not to take any returns.

    What arrives too late is handed back, also when this is cancelled. That counts as a delivery, so what was there when
    this was called is waited for.

    Raises:
        LostState: the queue's stream is gone.
        Disconnected: the bus was closed.
    """
    asked_at = time.monotonic()
    pull = asyncio.create_task(queue.fetch(limit, LONG_PULL_S))
    others = [asyncio.create_task(reason) for reason in reasons]
    try:
        await asyncio.wait([pull, *others], return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait([pull], timeout=max(asked_at + LEAST_PULL_S - time.monotonic(), 0.0))
        pull.cancel()  # does nothing when it is done
        (found,) = await asyncio.gather(pull, return_exceptions=True)
    except asyncio.CancelledError:
        pull.cancel()
        if isinstance(late := (await asyncio.gather(pull, return_exceptions=True))[0], list):
            await asyncio.gather(*(delivery.nak() for delivery in late))
        raise
    finally:
        for other in others:
            other.cancel()
    if isinstance(found, asyncio.CancelledError):
        return []
    if isinstance(found, BaseException):
        raise found
    return found
