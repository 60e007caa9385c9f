"""How many groups of 16 KiB a second are published, fetched and acknowledged, each step confirmed by the broker.

    python -m bench.bus [--seconds 5] [--size-kib 16]

One process publishes to the stream ``episodes`` and takes from it, through the same ``Bus`` that the hubs use, against a
private nats-server: once with the server's default sync interval, once with ``sync_interval: always``. In both, a message
is written to the file before it is confirmed; with the second it is also on the disk. A cycle is one group that was
published (confirmed), fetched, decoded with all checks and acknowledged (confirmed).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time

import numpy as np
import uvloop

from bench.codec import trajectory
from broker import wire
from broker.jetstream import Bus
from broker.server import BrokerServer
from broker.streams import EPISODES

POOL = "bench"
WRITERS = 64  # groups that are published at once, as by one busy hub
FETCH = 128


def group_of(size_bytes: int) -> wire.Group:
    """A group of eight trajectories whose encoding has about that many bytes."""
    num_tokens = 8
    while len(wire.encode(_group(num_tokens))) < size_bytes:
        num_tokens += 4
    return _group(num_tokens)


def _group(num_tokens: int) -> wire.Group:
    return wire.Group(
        ticket=1,
        domain="bench",
        task_index=0,
        min_version=7,
        hub="envhub-1",
        deliveries=1,
        pools=[POOL],
        trajectories=[trajectory(num_tokens, episode) for episode in range(8)],
    )


class Cycles:
    """Publishes, fetches and acknowledges until cancelled, and counts."""

    def __init__(self, bus: Bus, group: wire.Group) -> None:
        self._bus, self._group = bus, group
        self._room = asyncio.Semaphore(4 * FETCH)  # published and not yet acknowledged, so that neither side runs ahead
        self.done = 0

    async def run(self, seconds: float) -> float:
        """Cycles per second, counted after a short warm-up."""
        tasks = [asyncio.create_task(self._publish()) for _ in range(WRITERS)] + [asyncio.create_task(self._take())]
        await asyncio.sleep(0.5)
        before, started = self.done, time.perf_counter()
        await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
        rate = (self.done - before) / (time.perf_counter() - started)
        for task in tasks:
            task.cancel()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(outcome, Exception):
                raise outcome
        return rate

    async def _publish(self) -> None:
        while True:
            await self._room.acquire()
            await self._bus.publish(EPISODES, self._group, key=POOL, ticket=1)

    async def _take(self) -> None:
        queue = await self._bus.work_queue(EPISODES, POOL)
        async with asyncio.TaskGroup() as acking:
            while True:
                for delivery in await queue.fetch(FETCH, 0.2):
                    assert delivery.message is not None, delivery.error
                    acking.create_task(delivery.ack()).add_done_callback(self._acked)

    def _acked(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is None:
            self.done += 1
            self._room.release()


async def measure(url: str, group: wire.Group, seconds: float, name: str) -> float:
    """Cycles per second in a run of its own."""
    bus = await Bus.connect(url, name, name="bench", deadline_s=20)
    await bus.ensure_streams()
    rate = await Cycles(bus, group).run(seconds)
    await bus.delete_streams()
    await bus.close()
    return rate


def main() -> None:
    """Measure and print; the last line is one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0, help="length of one measurement")
    parser.add_argument("--repeats", type=int, default=3, help="measurements of each kind; the median counts")
    parser.add_argument("--size-kib", type=float, default=16.0, help="encoded size of a group")
    options = parser.parse_args()
    group = group_of(int(options.size_kib * 1024))
    print(f"groups of {len(wire.encode(group))} bytes")
    figures = {}
    for name, sync_always in (("cycle_per_s", False), ("cycle_per_s_sync_always", True)):
        with tempfile.TemporaryDirectory(prefix="rlearner-bench-") as store, BrokerServer(store, sync_always=sync_always) as server:
            rates = [uvloop.run(measure(server.url, group, options.seconds, f"bench-{n}")) for n in range(options.repeats)]
        print(f"{name}: {', '.join(f'{rate:.0f}' for rate in rates)}")
        figures[name] = round(float(np.median(rates)), 1)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
