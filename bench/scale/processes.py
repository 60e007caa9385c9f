"""What idle processes cost the broker, by their number: real buses, presence, watches and pulls
over one nats-server.

Each simulated process is a member of the run with the code that a real one runs while it has
nothing to do; only its engines, environments and threads are left out. Many share one OS process,
so that a small machine can hold a thousand.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from typing import Any, Final

import uvloop

from broker.contract import wire
from broker.contract.streams import CONTROL, EPISODES, EVALTICKETS, RERUNS, TICKETS, WEIGHTS
from broker.jetstream.bus import Bus
from broker.jetstream.core_messages import answer_requests
from broker.jetstream.pulling import fetch_unless
from broker.nats.connection import NatsLink
from broker.runtime.presence import Roster
from broker.runtime.process import Member, Stop, add_join_options, join, raise_file_limit
from broker.server.private_server import BrokerServer
from broker.settings.runspec import publish_runspec
from broker.system.children import cpu_s
from envhub.scheduling.slots import EpisodeSlots
from envhub.servers.servers import ServerRoster
from envhub.tickets.feed import QueueTurns, TicketFeed

SIZES: Final = (60, 250, 1000)
CHILDREN: Final = 4
JOINING: Final = 8  # at once, in each child
SETTLE_S: Final = 8.0
WINDOW_S: Final = 20.0
JOIN_S: Final = 240.0
RUN: Final = "scale"
METRICS: Final = {f"envhub/measured_{number}": 0.5 for number in range(15)}


def measure() -> dict[str, Any]:
    """Return rows of (processes, broker CPU seconds per second, and per process in milliseconds)."""
    logging.getLogger().setLevel("ERROR")
    raise_file_limit()
    return {"processes": [_measure(size) for size in SIZES]}


def roles(size: int) -> list[str]:
    """Return 10 % rollout servers, 85 % environment hubs, the rest reward hubs."""
    servers = size // 10
    hubs = size * 85 // 100
    return ["rollout"] * servers + ["envhub"] * hubs + ["rewardhub"] * (size - servers - hubs)


def _measure(size: int) -> dict[str, Any]:
    with (
        tempfile.TemporaryDirectory(prefix="rlearner-scale-") as folder,
        BrokerServer(f"{folder}/store") as server,
    ):
        asyncio.run(_publish_spec(server.url))
        command = [sys.executable, "-m", "bench.scale.processes", server.url, str(size)]
        commands = [[*command, str(number)] for number in range(CHILDREN)]
        pipe = subprocess.PIPE
        children = [subprocess.Popen(one, stdin=pipe, stdout=pipe) for one in commands]
        try:
            for child in children:
                if child.stdout is None or child.stdout.readline() != b"joined\n":
                    raise RuntimeError("a simulated process did not join")
            time.sleep(SETTLE_S)
            began = time.monotonic()
            before = cpu_s(server.pid)
            time.sleep(WINDOW_S)
            cores = (cpu_s(server.pid) - before) / (time.monotonic() - began)
        finally:
            for child in children:
                child.kill()
                child.wait()
    return {
        "processes": size,
        "broker_cores": round(cores, 4),
        "per_process_ms": round(1000 * cores / size, 4),
    }


async def _publish_spec(url: str) -> None:
    bus = await Bus.connect(url, RUN, name="learner", deadline_s=30)
    await bus.ensure_streams()
    spec = wire.RunSpec(run=RUN, wire_version=wire.WIRE_VERSION, epoch=1, config={}, model_path="m")
    await publish_runspec(bus, spec)
    await bus.key_value(CONTROL).put(RUN, wire.DesiredState(state="running"))
    await bus.close()


# ------------------------------------------------------------------------------------------ one
# child: many processes


class MarksConnection:
    """The connection that a process's in-progress marks have, without their thread: there is
    nothing to mark.
    """

    def __init__(self, bus: Bus) -> None:
        self._link = NatsLink(bus.link.url, f"{bus.name} marks", bus.link.find_login)
        self._opening: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._opening = self._opening or asyncio.create_task(self._link.open())

    async def close(self) -> None:
        await self._link.close()


async def _child(url: str, size: int, number: int) -> None:
    async with AsyncExitStack() as stack:
        several = asyncio.Semaphore(JOINING)

        async def enter(role: str, index: int) -> None:
            async with several:
                member = await stack.enter_async_context(
                    join(role, _options(url, f"{role}-{index}"), Stop())
                )
                member.bus._marks = MarksConnection(member.bus)  # type: ignore[assignment]
            await _live(member, index)

        mine = list(enumerate(roles(size)))[number::CHILDREN]
        async with asyncio.timeout(JOIN_S):
            await asyncio.gather(*(enter(role, index) for index, role in mine))
        if number == 0:
            await _learner(stack, url)
        print("joined", flush=True)
        await asyncio.to_thread(sys.stdin.read)


def _options(url: str, name: str) -> argparse.Namespace:
    """Return the options of a real process of that name."""
    parser = argparse.ArgumentParser()
    add_join_options(parser)
    arguments = ["--broker", url, "--run", RUN, "--id", name, "--connect-deadline", str(JOIN_S)]
    return parser.parse_args([*arguments, "--log-level", "ERROR"])


async def _live(member: Member, index: int) -> None:
    """Do what an idle process of its role does."""
    await asyncio.sleep(random.random())  # processes do not start in step
    address = f"tcp://127.0.0.1:{20000 + index}" if member.role == "rollout" else ""
    presence = wire.Presence(
        role=member.role, id=member.id, host="node-1", pid=index, state="serving", address=address, channel="zmq",
        engine="vllm", policy_version=0, slots=64, serves=["lake"],
    )  # fmt: skip
    member.announce(lambda: presence)
    member.report(lambda: METRICS)
    for work in {"rollout": _rollout, "envhub": _envhub, "rewardhub": _rewardhub}[member.role](
        member
    ):
        member.spawn(work)


def _rollout(member: Member) -> list[Coroutine[Any, Any, None]]:
    async def follow_weights() -> None:
        async for _ in member.bus.watch_last(WEIGHTS):
            pass

    return [follow_weights()]


def _envhub(member: Member) -> list[Coroutine[Any, Any, None]]:
    slots = EpisodeSlots(64, max_retries=2)
    turnstile = QueueTurns(slots)
    servers = ServerRoster(member.bus, set, random.Random(member.id))

    def feed(stream: Any) -> Coroutine[Any, Any, None]:
        return TicketFeed(
            member,
            turnstile,
            stream,
            "lake",
            8,
            lambda *_: 8,
            lambda _: 0,
            lambda _: bool(servers.alive("actor")),
            servers.changed,
        ).run()

    return [servers.serve(), feed(TICKETS), feed(EVALTICKETS), _answer_reruns(member)]


def _rewardhub(member: Member) -> list[Coroutine[Any, Any, None]]:
    async def feed() -> None:
        queue = await member.bus.work_queue(EPISODES, "rules")
        while True:
            await fetch_unless(queue, 8, member.pausing.wait())

    return [feed(), _answer_reruns(member)]


async def _answer_reruns(member: Member) -> None:
    async def nothing(_: wire.Message) -> None:
        return None

    await answer_requests(member.bus, RERUNS, member.id, nothing)


async def _learner(stack: AsyncExitStack, url: str) -> None:
    """Receive what a learner receives from the fleet."""
    bus = await Bus.connect(url, RUN, name="learner", deadline_s=JOIN_S)
    roster = Roster(bus, beats=("rollout",), members=("envhub", "rewardhub"))
    await roster.start()
    stack.push_async_callback(bus.close)
    spec = wire.RunSpec(run=RUN, wire_version=wire.WIRE_VERSION, epoch=1, config={}, model_path="m")
    member = Member(bus, spec, "learner", "learner", Stop())
    member.announce(
        lambda: wire.Presence(
            role="learner",
            id="learner",
            host="node-1",
            pid=1,
            state="serving",
            epoch=1,
            policy_version=0,
        )
    )
    member.report(lambda: METRICS)


if __name__ == "__main__":
    logging.getLogger().setLevel("ERROR")
    uvloop.run(_child(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
