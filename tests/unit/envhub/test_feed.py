"""Which queue of a hub gets room, for how long: the fetches that two feeds of one turnstile make."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from waits import LONG_S

from broker.contract.streams import EVALTICKETS, TICKETS, Stream
from broker.jetstream.bus import Delivery
from broker.jetstream.pulling import LONG_PULL_S
from broker.runtime.process import Member
from envhub.scheduling.slots import EpisodeSlots
from envhub.tickets.feed import QueueTurns, TicketFeed


class Queue:
    """Empty; every fetch comes back at once and tells how many tickets it was for and how long it
    would have waited.
    """

    def __init__(self) -> None:
        self.asked: list[tuple[int, float]] = []
        self.news = asyncio.Event()
        self.tickets: list[Delivery] = []

    async def fetch(self, count: int, patience_s: float) -> list[Delivery]:
        self.asked.append((count, patience_s))
        self.news.set()
        await asyncio.sleep(0)
        found, self.tickets = self.tickets, []
        return found


def feed(queue: Queue, turnstile: QueueTurns, stream: Stream, group_size: int) -> TicketFeed:
    async def work_queue(*_: Any) -> Queue:
        return queue

    running, pausing = asyncio.Event(), asyncio.Event()
    running.set()
    member = cast(
        Member,
        SimpleNamespace(
            bus=SimpleNamespace(work_queue=work_queue), running=running, pausing=pausing
        ),
    )
    return TicketFeed(
        member,
        turnstile,
        stream,
        "lake",
        group_size,
        lambda *_: group_size,
        lambda _: 0,
        lambda _: True,
        asyncio.sleep,
    )


async def test_a_queue_waits_for_nothing_while_another_wants_the_room() -> None:
    turnstile = QueueTurns(EpisodeSlots(2, max_retries=0))
    training, evaluation = Queue(), Queue()
    taken = turnstile.slots.reserve(2, 1)
    tasks = [
        asyncio.create_task(feed(queue, turnstile, stream, 2).run())
        for queue, stream in ((evaluation, EVALTICKETS), (training, TICKETS))
    ]
    try:
        while not turnstile.crowded:  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        turnstile.release(2, taken)
        async with asyncio.timeout(LONG_S):
            await training.news.wait()
            await evaluation.news.wait()
        assert evaluation.asked[0] == (1, 0.0)
        assert training.asked[0][1] > 0  # whom nobody waits for any more
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_queue_that_had_tickets_is_asked_again_for_as_many_as_there_is_room_for() -> None:
    turnstile = QueueTurns(EpisodeSlots(16, max_retries=0))
    queue = Queue()
    queue.tickets = [cast(Delivery, object())]
    task = asyncio.create_task(feed(queue, turnstile, TICKETS, 4).run())
    try:
        async with asyncio.timeout(LONG_S):
            while len(queue.asked) < 2:  # noqa: ASYNC110 - nor does it
                await asyncio.sleep(0)
        assert queue.asked[0][0] == 1  # nobody knows yet whether it has any
        assert queue.asked[1] == (4, LONG_PULL_S)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
