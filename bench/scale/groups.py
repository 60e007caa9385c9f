"""Measure groups of 1 to 256 MiB from publisher to acknowledgement, against bare nats-py with
messages of 1 MiB.

Both sides of either path are separate processes; their rounds alternate in one run. Memory is the
anonymous resident memory of the worse of the two processes: (peak - idle - 32 MiB) / group.
"""

from __future__ import annotations

import asyncio
import gc
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import IO, Any, Final

import msgspec
import numpy as np
import uvloop

from bench.support.peak_memory import PeakMemory
from broker.contract import wire
from broker.contract.examples import EXAMPLES
from broker.contract.streams import EPISODES
from broker.identity.login import client_options
from broker.jetstream.bus import Bus, Delivery, WorkQueue
from broker.jetstream.ticket_results import ticket_key
from broker.nats.client import GuardedClient
from broker.server.private_server import BrokerServer

SIZES_MIB: Final = (1, 8, 64, 256)
# that one round moves: enough groups that both sides work at once
TOTAL_MIB: Final = {1: 96, 8: 192, 64: 512, 256: 1536}
ROUNDS: Final = {1: 5, 8: 4, 64: 3, 256: 2}
IN_FLIGHT_MIB: Final = 16  # groups that are published and taken at once, at least one
FREE_MIB: Final = 32
MIB: Final = 1 << 20
EPISODES_IN_GROUP: Final = 16
BARE: Final = "bare"


def measure() -> dict[str, Any]:
    """Return one row per size."""
    with (
        tempfile.TemporaryDirectory(prefix="rlearner-groups-") as folder,
        BrokerServer(f"{folder}/store", store_max_gib=64) as server,  # its keys are next to it
    ):
        return {"groups": [_row(server.url, size) for size in SIZES_MIB]}


def _row(url: str, size_mib: int) -> dict[str, float]:
    count = TOTAL_MIB[size_mib] // size_mib
    run = f"groups-{size_mib}"
    shares = []
    ratios = []
    asyncio.run(_prepare(url, run))
    with _Side(url, run, "put", size_mib) as put, _Side(url, run, "take", size_mib) as take:
        for _ in range(ROUNDS[size_mib]):
            seconds = {}
            for path in ("bus", BARE):
                for side in (take, put):
                    side.tell(f"{path} {count}")
                    side.hear()
                began = time.monotonic()
                for side in (take, put):
                    side.tell("go")
                used = [side.hear() for side in (put, take)]
                seconds[path] = time.monotonic() - began
                if path == "bus":
                    ratios.append(max(used) / size_mib)
            shares.append(seconds[BARE] / seconds["bus"])
    asyncio.run(_prepare(url, run, again=False))
    row = {
        "group_mib": size_mib,
        "share_of_bare": statistics.median(shares),
        "memory_ratio": max(ratios),
    }
    return {name: round(value, 3) for name, value in row.items()}


async def _prepare(url: str, run: str, *, again: bool = True) -> None:
    bus = await Bus.connect(url, run, name="bench", deadline_s=60)
    await bus.delete_streams()
    if again:
        await bus.ensure_streams()
    await bus.close()


class _Side:
    """A child process that does one side of a round whenever it is told to."""

    def __init__(self, url: str, run: str, side: str, size_mib: int) -> None:
        command = [sys.executable, "-m", "bench.scale.groups", url, run, side, str(size_mib)]
        self._child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> _Side:
        self.hear()
        return self

    def __exit__(self, *_: object) -> None:
        _pipe(self._child.stdin).close()
        self._child.wait(30)

    def tell(self, line: str) -> None:
        _pipe(self._child.stdin).write(line + "\n")
        _pipe(self._child.stdin).flush()

    def hear(self) -> float:
        """Return peak memory beyond idle and free memory in MiB; raise RuntimeError if the process
        has exited.
        """
        if not (line := _pipe(self._child.stdout).readline()):
            raise RuntimeError("a process of the measurement has ended")
        return float(line)


def _pipe(stream: IO[str] | None) -> IO[str]:
    assert stream is not None
    return stream


# -------------------------------------------------------------------------------------------------
# the children


async def _child(url: str, run: str, side: str, size_mib: int) -> None:
    bus = await Bus.connect(url, run, name=side, deadline_s=60)
    queue = await bus.work_queue(EPISODES, "bus")
    bare = await bus.work_queue(EPISODES, BARE)  # the same kind of stream and consumer
    del bare
    client = GuardedClient()
    await client.connect(url, **client_options(url))
    at_once = max(1, min(4, IN_FLIGHT_MIB // size_mib))
    works: dict[str, Callable[[int, wire.Group | None], Any]] = {
        "put bus": lambda count, group: _put(bus, group, count, at_once),
        "take bus": lambda count, _: _take(queue, count, at_once),
        f"put {BARE}": lambda count, _: _put_bare(client, run, count * size_mib),
        f"take {BARE}": lambda count, _: _take_bare(client, run, count * size_mib),
    }
    loop = asyncio.get_running_loop()
    print(0, flush=True)
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        path, count = line.split()
        gc.collect()
        with PeakMemory() as peak:
            group = made_up_group(1, size_mib * MIB) if (side, path) == ("put", "bus") else None
            print(0, flush=True)
            await loop.run_in_executor(None, sys.stdin.readline)
            await works[f"{side} {path}"](int(count), group)
            del group
        print(max(peak.most - peak.idle - FREE_MIB, 0.0), flush=True)
    await client.close()
    await bus.close()


async def _put(bus: Bus, group: wire.Group | None, count: int, at_once: int) -> None:
    window = asyncio.Semaphore(at_once)
    assert group is not None

    async def put(number: int) -> None:
        async with window:
            await bus.publish(
                EPISODES, msgspec.structs.replace(group, ticket=number), key="bus", ticket=number
            )

    await asyncio.gather(*(put(number) for number in range(1, count + 1)))


async def _take(queue: WorkQueue, count: int, at_once: int) -> None:
    async def take(delivery: Delivery) -> None:
        assert isinstance(await delivery.load(), wire.Group), delivery.error
        await delivery.ack()

    while count:
        deliveries = await queue.fetch(at_once, 5.0)
        await asyncio.gather(*(take(delivery) for delivery in deliveries))
        count -= len(deliveries)


async def _put_bare(client: GuardedClient, run: str, num_mib: int) -> None:
    stream = client.jetstream()
    payload = bytes(MIB - 256)
    key = f"{BARE}.{ticket_key(1, evaluation=False)}"
    window = asyncio.Semaphore(4)
    subject = EPISODES.subject(run, key)

    async def put() -> None:
        async with window:
            await stream.publish(subject, payload)

    await asyncio.gather(*(put() for _ in range(num_mib)))


async def _take_bare(client: GuardedClient, run: str, num_mib: int) -> None:
    stream = client.jetstream()
    durable = await stream.pull_subscribe_bind(BARE, EPISODES.stream_name(run))
    while num_mib:
        for message in await durable.fetch(min(num_mib, 4), timeout=5):
            await message.ack_sync()
            num_mib -= 1
    await durable.unsubscribe()


def made_up_group(ticket: int, size: int) -> wire.Group:
    """Return a group that encodes to slightly less than ``size`` bytes."""
    example = EXAMPLES[wire.Group]
    assert isinstance(example, wire.Group)
    n = (size - 16384) // 9 // EPISODES_IN_GROUP
    turn = msgspec.structs.replace(example.trajectories[0].turns[0], start=0, end=n)
    columns: dict[str, Any] = {"token_ids": wire.column(np.full(n, ticket), "<i4")}
    columns |= {
        "loss_mask": wire.column(np.ones(n), "|u1"),
        "logprobs": wire.column(np.full(n, -1.0), "<f4"),
    }
    columns |= {"version_runs": wire.column([3, n], "<i4")}
    episodes = []
    for episode in range(EPISODES_IN_GROUP):
        # memory of its own
        own = {
            name: wire.Column(one.dtype, bytes(bytearray(one.data)))
            for name, one in columns.items()
        }
        episodes.append(
            msgspec.structs.replace(example.trajectories[0], episode=episode, turns=[turn], **own)
        )
    return msgspec.structs.replace(example, ticket=ticket, trajectories=episodes, pools=["bus"])


if __name__ == "__main__":
    uvloop.run(_child(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])))
