"""Three brokers, each of them killed under load: what was confirmed is there, whoever was connected
goes on, nobody is told otherwise.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from pathlib import Path

import msgspec
import pytest
from broker_cluster import NODES, ClusterNodes

from broker.contract import wire
from broker.contract.examples import EXAMPLES
from broker.contract.streams import CONTROL, SAMPLES, TICKETS
from broker.jetstream.api import call_api
from broker.jetstream.bus import Bus, Delivery

SECONDS_DOWN = 1.5
ROUNDS = int(os.environ.get("RL_CHAOS_CLUSTER", "1"))  # of killing each server; `make chaos` has 5


def ticket(number: int) -> wire.Ticket:
    example = EXAMPLES[wire.Ticket]
    assert isinstance(example, wire.Ticket)
    return msgspec.structs.replace(example, number=number)


def closed(number: int) -> wire.Closed:
    return wire.Closed(ticket=number, domain="lake", reason="deadline", detail="", by="test")


@pytest.fixture
async def nodes(tmp_path: Path) -> AsyncIterator[ClusterNodes]:
    made = ClusterNodes(tmp_path / "cluster")
    try:
        await asyncio.to_thread(made.start_all)
        yield made
    finally:
        await asyncio.to_thread(made.stop)


class Load:
    """A learner's, a hub's and a watcher's traffic, each on a connection of its own, and what each
    was told.
    """

    def __init__(self, buses: list[Bus]) -> None:
        self.issuer, self.hub, self.reader, self.watcher = buses
        self.issued = 0
        self.confirmed: list[int] = []  # sequences of the records that the hub has appended
        self.acked: set[int] = set()
        self.read: list[tuple[int, int]] = []  # (sequence, ticket)
        self.swapped = 0
        self.seen = 0  # newest swap that the watcher saw
        self.stop = asyncio.Event()

    async def issue(self) -> None:
        """Tickets with expected-last-sequence; by one issuer alone each must be stored at its own
        number.
        """
        while not self.stop.is_set():
            number = self.issued + 1
            assert (
                await self.issuer.publish(
                    TICKETS, ticket(number), key="lake", expected_last_seq=number - 1
                )
                == number
            )
            self.issued = number
            await asyncio.sleep(0.01)

    async def work(self) -> None:
        queue = await self.hub.work_queue(TICKETS, "lake")
        while True:
            deliveries = await queue.fetch(16, 1.0)
            await asyncio.gather(*(self._finish(delivery) for delivery in deliveries))

    async def _finish(self, delivery: Delivery) -> None:
        seq = await self.hub.publish(SAMPLES, closed(delivery.seq), ticket=delivery.seq)
        assert seq is not None
        self.confirmed.append(seq)
        await delivery.ack()
        self.acked.add(delivery.seq)

    async def follow(self) -> None:
        async with aclosing(self.reader.read_log(SAMPLES, 1)) as records:
            async for record in records:
                self.read.append((record.seq, record.ticket))

    async def swap(self) -> None:
        """Compare-and-swap by one process alone never fails, however often the confirmation is
        lost.
        """
        control = self.issuer.key_value(CONTROL)
        revision = await control.create("swap", wire.DesiredState(state="running", reason="0"))
        assert revision is not None
        while not self.stop.is_set():
            value = wire.DesiredState(state="running", reason=str(self.swapped + 1))
            swapped = await control.update("swap", value, revision)
            assert swapped is not None, f"swap {self.swapped + 1} was refused"
            revision, self.swapped = swapped, self.swapped + 1
            await asyncio.sleep(0.02)

    async def watch(self) -> None:
        control = self.watcher.key_value(CONTROL)
        async for message, _ in control.watch("swap"):
            if isinstance(message, wire.DesiredState):
                self.seen = int(message.reason)


async def until(
    what: Callable[[], bool], tasks: list[asyncio.Task[None]], within_s: float = 120.0
) -> float:
    """Seconds until it holds; whatever fails meanwhile is raised."""
    began = time.monotonic()
    while not what():
        for task in tasks:
            if task.done():
                task.result()
        assert time.monotonic() - began < within_s, "does not go on"
        await asyncio.sleep(0.02)
    return time.monotonic() - began


@pytest.mark.timeout(600)
# nats-py's sockets of attempts at a dead server
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_any_one_server_may_be_killed_under_load(nodes: ClusterNodes) -> None:
    buses = [
        await Bus.connect(nodes.url, "demo", name=f"bus-{number}", deadline_s=30)
        for number in range(4)
    ]
    await buses[0].ensure_streams()
    for stream in ("rl_demo_tickets", "rl_demo_samples", "KV_rl_demo_control"):
        assert (await call_api(buses[0].link, f"STREAM.INFO.{stream}"))["config"][
            "num_replicas"
        ] == 3
    load = Load(buses)
    ending = [asyncio.create_task(work()) for work in (load.issue, load.swap)]
    endless = [asyncio.create_task(work()) for work in (load.work, load.follow, load.watch)]
    tasks = ending + endless
    took: list[float] = []
    try:
        await until(lambda: load.issued > 30 and len(load.read) > 30 and load.seen > 10, tasks)
        for number in [victim for _ in range(ROUNDS) for victim in range(NODES)]:
            issued, swapped = load.issued, load.swapped
            began = time.monotonic()
            restarting = asyncio.create_task(nodes.restart(number, SECONDS_DOWN))
            # what was issued before has its record read, and everyone has gone on
            done = lambda issued=issued, swapped=swapped: (  # noqa: E731
                {ticket for _, ticket in load.read} >= set(range(1, issued + 1))
                and load.issued > issued + 5
                and load.swapped > swapped + 5
                and load.seen > swapped + 5
            )
            await until(done, tasks)
            took.append(time.monotonic() - began)
            await restarting
            await nodes.settled(buses[0])
        load.stop.set()
        await asyncio.gather(*ending)
        await until(
            lambda: (
                {ticket for _, ticket in load.read} >= set(range(1, load.issued + 1))
                and load.seen == load.swapped
            ),
            endless,
        )
        last = await buses[0].last_seq(SAMPLES)
        await until(lambda: load.read[-1][0] == last, endless)
    finally:
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        for bus in buses:
            await bus.close()
    assert [error for error in results if isinstance(error, Exception)] == []
    assert [seq for seq, _ in load.read] == list(range(1, last + 1))  # in order, without a gap
    assert set(load.confirmed) <= set(range(1, last + 1))
    repeated = len(load.read) - load.issued
    print(
        f"{load.issued} tickets, {load.swapped} swaps, {repeated} records repeated; gone on after "
        f"{[round(s, 1) for s in took]} s"
    )
