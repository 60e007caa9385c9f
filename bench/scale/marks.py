"""Count the in-progress marks of 16,000 tickets in hand, at a real nats-server, with the consumers
of such a run.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from typing import Any, Final

from broker.contract import wire
from broker.contract.examples import EXAMPLES
from broker.contract.streams import TICKETS, ack_wait_s
from broker.jetstream.ack_progress import IN_PROGRESS
from broker.jetstream.bus import Bus
from broker.nats.client import Msg
from broker.server.private_server import BrokerServer

RUN: Final = "marks"
IN_HAND: Final = 16_000
HUBS: Final = 8
PULL: Final = 500
WINDOW_S: Final = 30.0


def measure() -> dict[str, Any]:
    """Return ``marks_per_s`` at ``marks_in_hand``, the ack_wait in seconds, and how many were
    delivered again.
    """
    with tempfile.TemporaryDirectory() as folder, BrokerServer(f"{folder}/store") as server:
        return asyncio.run(_count(server.url, WINDOW_S))


async def _count(url: str, window_s: float) -> dict[str, Any]:
    learner = await Bus.connect(url, RUN, name="learner", deadline_s=30)
    await learner.ensure_streams()
    wait_s = ack_wait_s(IN_HAND)
    await learner.ensure_consumers(TICKETS, ["lake"], wait_s)
    ticket = EXAMPLES[wire.Ticket]
    for first in range(1, IN_HAND + 1, PULL):
        numbers = range(first, first + PULL)
        await asyncio.gather(
            *(learner.publish(TICKETS, ticket, key="lake", ticket=number) for number in numbers)
        )
    hubs = [
        await Bus.connect(url, RUN, name=f"hub-{number}", deadline_s=30) for number in range(HUBS)
    ]
    await asyncio.gather(*(_take(hub, IN_HAND // HUBS) for hub in hubs))
    marks = 0

    async def count_mark(message: Msg) -> None:
        nonlocal marks
        marks += message.data == IN_PROGRESS

    await learner.link.subscribe("$JS.ACK.>", count_mark)
    began = time.monotonic()
    again = await (await learner.work_queue(TICKETS, "lake")).fetch(PULL, window_s)
    seconds = time.monotonic() - began
    for bus in (*hubs, learner):
        await bus.close()
    per_s = round(marks / seconds, 1)
    return {
        "marks_per_s": per_s,
        "marks_in_hand": IN_HAND,
        "marks_ack_wait_s": wait_s,
        "marks_redelivered": len(again),
    }


async def _take(hub: Bus, count: int) -> None:
    queue = await hub.work_queue(TICKETS, "lake")
    while count:
        count -= len(await queue.fetch(min(count, PULL), 30.0))
