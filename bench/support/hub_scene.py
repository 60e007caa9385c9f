"""A hub with a broker, a run, endless tickets, and a server that answers after a fixed time, for
``bench.envhub``.

The server, the tickets and the counting are in this process, the hub is ``envhub.cli`` as users
start it.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil

from bench.support.slow_server import SlowServer
from broker.contract import wire
from broker.contract.streams import MEMBERS, SAMPLES, TICKETS
from broker.jetstream.bus import Bus
from broker.server.private_server import BrokerServer
from broker.settings import runspec
from broker.system.children import cpu_s, spawn
from envhub.envs.base import StepResult
from envhub.envs.games.frozenlake import FrozenLake, FrozenLakeArgs
from rlearner_text.config import TinyModel
from rlearner_text.tiny import build_tiny
from rlearner_text.tokenizer import Tokenizer

AHEAD: Final = 2  # times the hub's size in episodes that wait as tickets
JOIN_S: Final = 120.0  # for the hub to begin
AT_ONCE: Final = 32  # tickets that are published at once


class HangingLakeArgs(FrozenLakeArgs):
    """``env_args`` of ``HangingLake``."""

    hanging: int = 0  # tasks, the first ones, in which the first step never returns


class HangingLake(FrozenLake):
    """The frozen lake, where some tasks hang for good."""

    Args = HangingLakeArgs
    _hangs = False

    def reset(self, task_index: int, split: Any, seed: int) -> Any:
        self._hangs = task_index < self.args.hanging  # type: ignore[attr-defined]
        return super().reset(task_index, split, seed)

    def step(self, text: str) -> StepResult:
        while self._hangs:
            time.sleep(1.0)
        return super().step(text)


@dataclass
class HubScene:
    """One run with one hub of n slots; ``idle_mib`` is the memory of the hub before its first
    ticket.
    """

    bus: Bus
    server: SlowServer
    hub: subprocess.Popen[bytes]
    log: Path
    n: int
    group_size: int
    idle_mib: float = 0.0

    async def full(self, share: float = 0.9, within_s: float = 60.0) -> None:
        """Wait until that share of the slots waits for the server and the effects of the start have
        passed.
        """
        try:
            async with asyncio.timeout(within_s):
                while self.server.waiting < share * self.n:  # noqa: ASYNC110 - the counter is no event
                    await asyncio.sleep(0.02)
        except TimeoutError:
            pass  # it never is that full: the rate will say so
        await asyncio.sleep(max(3 * self.server.latency_s, 1.0))

    async def turns_per_s(self, seconds: float) -> float:
        """Return the turns per second that the server answers."""
        began = time.perf_counter()
        answered = self.server.answered
        await asyncio.sleep(seconds)
        return (self.server.answered - answered) / (time.perf_counter() - began)

    def mib(self) -> float:
        """Return the memory of the hub process in MiB."""
        return float(psutil.Process(self.hub.pid).memory_info().rss) / (1 << 20)

    def cpu_s(self) -> float:
        """Return the processor seconds of the hub process."""
        return cpu_s(self.hub.pid)

    def failed(self) -> int:
        """Count failed episodes in the log of the hub, including those that were retried."""
        return self.log.read_text(errors="replace").count(" failed: ")

    async def turns_per_episode(self) -> float:
        """Return the mean over the groups in the log."""
        turns = []
        last = await self.bus.last_seq(SAMPLES)
        async for record in self.bus.read_log(SAMPLES, max(last - 500, 1)):
            if isinstance(record.message, wire.Group):
                turns += [len(trajectory.turns) for trajectory in record.message.trajectories]
            if record.seq >= last:
                break
        return sum(turns) / max(len(turns), 1)


@asynccontextmanager
async def scene(
    folder: Path, n: int, latency_s: float, group_size: int, *, hanging: int | None = None
) -> AsyncIterator[HubScene]:
    """Yield a hub at work with n slots in an empty folder, served after ``latency_s``.

    Args:
        hanging: number of environments, run in processes, that hang; None: the unchanged lake in
            the hub's loop.

    Raises:
        UserError: if no broker starts.
        TimeoutError: if the hub does not begin.
    """
    model = build_tiny(folder / "model", TinyModel())
    broker = BrokerServer(str(folder / "broker"))
    broker.start()
    hub: subprocess.Popen[bytes] | None = None
    bus = await Bus.connect(broker.url, "bench", name="bench", deadline_s=20)
    server = SlowServer(bus, Tokenizer.load(model), latency_s)
    tasks = []
    try:
        await bus.ensure_streams()
        spec = wire.RunSpec(
            run="bench",
            wire_version=wire.WIRE_VERSION,
            epoch=1,
            config=_config(hanging),
            model_path=str(model),
        )
        await runspec.publish_runspec(bus, spec)
        log = folder / "envhub.log"
        command = [
            sys.executable,
            "-m",
            "envhub.cli",
            "--broker",
            broker.url,
            "--run",
            "bench",
            "--n",
            str(n),
        ]
        with log.open("ab") as output:
            hub = spawn(command, output, env={**os.environ, "OMP_NUM_THREADS": "1"})
        await _joined(bus, hub)
        made = HubScene(bus, server, hub, log, n, group_size)
        await server.start()
        made.idle_mib = made.mib()
        tasks.append(asyncio.create_task(_feed(bus, n, group_size)))
        yield made
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if hub is not None:
            hub.kill()
            hub.wait()
        await server.close()
        await bus.close()
        broker.stop()


def _config(hanging: int | None) -> dict[str, Any]:
    """Return the domains of the quickstart with timeouts that are never reached."""
    overrides = ["envhub.step_timeout_s=3600", "envhub.episode_timeout_s=3600"]
    if hanging is not None:
        overrides += [
            "domains.lake.env=bench.support.hub_scene:HangingLake",
            "domains.lake.isolation=process",
        ]
        overrides.append(f"domains.lake.env_args.hanging={hanging}")
    config = runspec.load("quickstart.yaml", overrides)
    return runspec.validate(config)


async def _joined(bus: Bus, hub: subprocess.Popen[bytes]) -> None:
    bucket = bus.key_value(MEMBERS)
    async with asyncio.timeout(JOIN_S):
        while not await bucket.values(f"{bus.run}.envhub"):
            if hub.poll() is not None:
                raise RuntimeError(f"the hub ended with {hub.returncode}")
            await asyncio.sleep(0.1)


async def _feed(bus: Bus, n: int, group_size: int) -> None:
    """Publish tickets so that some always wait."""
    number = 0
    wanted = AHEAD * n // group_size + 2
    while True:
        missing = wanted - (await bus.depth(TICKETS)).get("lake", 0)
        for _ in range(0, missing, AT_ONCE):
            await asyncio.gather(
                *(_publish(bus, number + offset + 1, group_size) for offset in range(AT_ONCE))
            )
            number += AT_ONCE
        await asyncio.sleep(0.05)


async def _publish(bus: Bus, number: int, group_size: int) -> None:
    ticket = wire.Ticket(number, "lake", number - 1, number, 0, 1, group_size, group_size, 3600.0)
    await bus.publish(TICKETS, ticket, key="lake", ticket=number)
