"""Wakes the reader of a last value whenever there may be a newer one, without a consumer on the
broker.

A value is stored by a publish to its subject, which a plain subscription receives too. That
includes values that the broker refused, may miss some, and may arrive before the value is stored,
so it only says when to read.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Final, TypeVar

from broker.nats.client import Msg
from broker.nats.connection import NatsLink
from broker.nats.nats_errors import Disconnected

T = TypeVar("T")

READ_AGAIN_S: Final = 20.0  # a plain subscription may miss a message
# reads after a message, which may arrive before it is stored
AFTER_NEWS_S: Final = (0.0, 0.1, 0.3, 1.0, 3.0)


async def newer_values(
    link: NatsLink, subject: str, read: Callable[[], Awaitable[tuple[int, int, T] | None]]
) -> AsyncGenerator[tuple[int, T], None]:
    """Yield (sequence, value) now and after each change, until the link is closed; skip
    intermediate values.

    Args:
        read: returns (sequence, time of its store in nanoseconds, value) of the newest, None if
            there is none; an older store may give a sequence to another value.
    """
    arrived = asyncio.Event()

    async def note(_: Msg) -> None:
        arrived.set()

    subscribed = await link.subscribe(subject, note)
    link.on_disconnect.add(arrived.set)
    last_seen = (0, 0)
    delays = [0.0]
    try:
        while not link.closed:
            await asyncio.sleep(delays.pop(0))
            try:
                newest = await read()
            except Disconnected:
                return
            if newest is not None and newest[:2] != last_seen:
                last_seen = newest[:2]
                delays.clear()
                yield newest[0], newest[2]
            if await _is_set_within(
                arrived, 0.0 if delays else READ_AGAIN_S * random.uniform(0.75, 1.25)
            ):
                delays = list(AFTER_NEWS_S)
            delays = delays or [0.0]
    finally:
        link.on_disconnect.discard(arrived.set)
        await subscribed.close()


async def _is_set_within(event: asyncio.Event, timeout_s: float) -> bool:
    """Return whether the event is set within that time, and clear it."""
    try:
        if not event.is_set():
            async with asyncio.timeout(timeout_s):
                await event.wait()
    except TimeoutError:
        return False
    event.clear()
    return True
