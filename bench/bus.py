"""Measure how many groups of 16 KiB per second are published, fetched and acknowledged, each
confirmed by the broker.

    python -m bench.bus [--seconds 5] [--size-kib 16]

One process publishes to the stream ``episodes`` and another takes from it, through the ``Bus`` that
hubs use, against a private nats-server: once with the server's default sync interval, once with
``sync_interval: always``, which also syncs a message to the disk before it is confirmed. A cycle is
one group that is checked, encoded, published (confirmed), fetched, decoded with all checks and
acknowledged (confirmed).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile

import msgspec
import numpy as np
import uvloop

from bench.codec import group
from broker.contract import codec, wire
from broker.contract.streams import EPISODES
from broker.jetstream.bus import Bus
from broker.server.private_server import BrokerServer

POOL = "bench"
WRITERS = 64  # groups that are published at once, as by one busy hub
FETCH = 128
FULL = 1024  # groups waiting in the stream at which the writer pauses
WARM_UP_S = 1.0


def group_of(size_bytes: int) -> wire.Group:
    """Return a group of eight trajectories that encodes to about this many bytes."""
    num_tokens = 8
    while len(codec.encode(_group(num_tokens))) < size_bytes:
        num_tokens += 4
    return _group(num_tokens)


def _group(num_tokens: int) -> wire.Group:
    return msgspec.structs.replace(group(num_tokens, 8), pools=[POOL])


async def write(url: str, run: str, size_bytes: int) -> None:
    """Publish until killed, without running far ahead of the reader."""
    bus = await Bus.connect(url, run, name="bench-writer", deadline_s=20)
    group = group_of(size_bytes)
    may_write = asyncio.Event()

    async def publish() -> None:
        while True:
            await may_write.wait()
            await bus.publish(EPISODES, group, key=POOL, ticket=1)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(WRITERS):
            tasks.create_task(publish())
        while True:
            if (await bus.depth(EPISODES)).get(POOL, 0) < FULL:
                may_write.set()
            else:
                may_write.clear()
            await asyncio.sleep(0.02)


async def read(url: str, run: str, seconds: float) -> float:
    """Fetch and acknowledge; return cycles per second after a warm-up."""
    bus = await Bus.connect(url, run, name="bench-reader", deadline_s=20)
    queue = await bus.work_queue(EPISODES, POOL)
    loop = asyncio.get_running_loop()
    started = 0.0
    done = 0
    acking = set[asyncio.Task[None]]()
    end = loop.time() + 60.0  # until the writer begins
    while loop.time() < end:
        deliveries = await queue.fetch(FETCH, 1.0)
        if deliveries and not started:
            started = loop.time() + WARM_UP_S
            end = started + seconds
        for delivery in deliveries:
            assert delivery.message is not None, delivery.error
            acking.add(asyncio.create_task(delivery.ack()))
        acked = {task for task in acking if task.done()}
        acking -= acked
        for task in acked:
            task.result()
        done += len(acked) if started and loop.time() > started else 0
    rate = done / (loop.time() - started)
    await asyncio.gather(*acking)
    await bus.close()
    return rate


async def prepare(url: str, run: str) -> None:
    bus = await Bus.connect(url, run, name="bench", deadline_s=20)
    await bus.ensure_streams()
    await bus.close()


def measure(size_bytes: int, seconds: float, *, sync_always: bool) -> float:
    """Return cycles per second against a fresh server."""
    with (
        tempfile.TemporaryDirectory(prefix="rlearner-bench-") as folder,
        BrokerServer(f"{folder}/store", sync_always=sync_always) as server,
    ):
        uvloop.run(prepare(server.url, "bench"))
        with subprocess.Popen(
            [
                sys.executable,
                "-m",
                "bench.bus",
                "--write",
                server.url,
                "--size-kib",
                str(size_bytes / 1024),
            ]
        ) as writer:
            try:
                rate: float = uvloop.run(read(server.url, "bench", seconds))
                return rate
            finally:
                writer.kill()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=5.0, help="length of one measurement")
    parser.add_argument(
        "--repeats", type=int, default=3, help="measurements of each kind; the median counts"
    )
    parser.add_argument("--size-kib", type=float, default=16.0, help="encoded size of a group")
    parser.add_argument("--write", metavar="URL", help=argparse.SUPPRESS)  # the writer's process
    options = parser.parse_args()
    size_bytes = int(options.size_kib * 1024)
    if options.write:
        uvloop.run(write(options.write, "bench", size_bytes))
        return
    print(f"groups of {len(codec.encode(group_of(size_bytes)))} bytes")
    figures = {}
    for name, sync_always in (("cycle_per_s", False), ("cycle_per_s_sync_always", True)):
        rates = [
            measure(size_bytes, options.seconds, sync_always=sync_always)
            for _ in range(options.repeats)
        ]
        print(f"{name}: {', '.join(f'{rate:.0f}' for rate in rates)}")
        figures[name] = round(float(np.median(rates)), 1)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
