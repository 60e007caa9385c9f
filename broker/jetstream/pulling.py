"""A long pull that ends early when one of several conditions holds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any, Final

from broker.jetstream.delivery import Delivery
from broker.jetstream.work_queue import WorkQueue

LONG_PULL_S: Final = 30.0  # interval at which an idle process polls each of its queues
# enough for stored messages to arrive; a pull cancelled sooner would cross with them
LEAST_PULL_S: Final = 0.2


async def fetch_unless(
    queue: WorkQueue, limit: int, *reasons: Coroutine[Any, Any, object]
) -> list[Delivery]:
    """Return up to ``limit`` messages, or none after 30 s or soon after one of the ``reasons`` not
    to fetch returns.

    Messages that arrive too late, or after a cancellation, are handed back. That counts as a
    delivery, so messages that are already stored are waited for.

    Raises:
        LostState: if the queue's stream does not exist.
        Disconnected: if the bus was closed.
    """
    asked_at = time.monotonic()
    pull = asyncio.create_task(queue.fetch(limit, LONG_PULL_S))
    reason_tasks = [asyncio.create_task(reason) for reason in reasons]
    try:
        await asyncio.wait([pull, *reason_tasks], return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait([pull], timeout=max(asked_at + LEAST_PULL_S - time.monotonic(), 0.0))
        pull.cancel()  # no effect if done
        (outcome,) = await asyncio.gather(pull, return_exceptions=True)
    except asyncio.CancelledError:
        pull.cancel()
        if isinstance(late := (await asyncio.gather(pull, return_exceptions=True))[0], list):
            await asyncio.gather(*(delivery.nak() for delivery in late))
        raise
    finally:
        for task in reason_tasks:
            task.cancel()
    if isinstance(outcome, asyncio.CancelledError):
        return []
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome
