"""Requests that wait for an answer while the connection goes."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest

from broker.nats.calls import PendingCalls
from broker.nats.nats_errors import Disconnected


@pytest.mark.parametrize("cancelled", [True, False])
async def test_who_stops_waiting_as_the_connection_goes_leaves_nothing_behind(
    cancelled: bool,
) -> None:
    """A request that is overdue is given up in the moment in which the connection breaks: nobody
    takes its error, and none is logged.
    """
    calls, logged = PendingCalls(), list[dict[str, Any]]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: logged.append(context))

    async def look() -> None:
        with calls.expect() as (_, answer):
            await asyncio.wait([answer])
            answer.result()

    looking = asyncio.create_task(look())
    await asyncio.sleep(0)
    calls.drop(Disconnected("gone"))
    if cancelled:
        looking.cancel()
    (outcome,) = await asyncio.gather(looking, return_exceptions=True)
    assert type(outcome) is (asyncio.CancelledError if cancelled else Disconnected)
    del looking, outcome
    await asyncio.sleep(0)  # its callbacks hold it until they have run
    gc.collect()
    assert logged == []
