"""The quickstart on three hosts, while processes are killed, hosts cut off and a token revoked."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

from bench.support.fleet import RunProcess, run_audit
from bench.support.hosts.host_fleet import HostFleet, hosts_of_a_fleet
from bench.support.watch import FleetWatch
from broker.contract.streams import EVALS, EVALTICKETS, SAMPLES, TICKETS
from broker.jetstream.bus import Bus

RUN: Final = "hosts"
NUM_HOSTS: Final = 3
LAYOUT: Final = {"rollout": [1], "envhub": [2], "rewardhub": [2]}
LIMIT_S: Final = 300.0
LOOK_EVERY_S: Final = 0.02


def measure_run(folder: Path, cut_s: float, steps: int) -> dict[str, Any]:
    """Return the figures of one run; see ``bench.hosts``.

    Args:
        cut_s: how long each host is cut off.
        steps: of training.
    """
    with hosts_of_a_fleet(NUM_HOSTS) as network:
        fleet = HostFleet(
            folder / "fleet",
            RUN,
            bind=network.addresses[0],
            network=network,
            layout=LAYOUT,
            hidden=[folder / "runs"],
        )
        return asyncio.run(_Quickstart(fleet, folder, cut_s, steps).measure())


class _Quickstart:
    def __init__(self, fleet: HostFleet, folder: Path, cut_s: float, steps: int) -> None:
        self._fleet = fleet
        self._folder = folder
        self._cut_s = cut_s
        self._steps = steps
        self._bus: Bus
        self._watch: FleetWatch

    async def measure(self) -> dict[str, Any]:
        async with self._fleet as fleet:
            self._bus = await Bus.connect(fleet.url, RUN, name="watch", deadline_s=20)
            await self._bus.ensure_streams()
            self._watch = FleetWatch(self._bus, self._folder / "runs" / RUN)
            watching = asyncio.create_task(self._watch.serve())
            join_s = await self._start()
            recoveries = await self._disturb()
            await self._watch.until(lambda: self._watch.step() >= self._steps, LIMIT_S)
            await fleet.wait_done(fleet.children)
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            await self._bus.close()
            audit = await asyncio.to_thread(run_audit, self._folder / "runs" / RUN, fleet.url)
        if fleet.crashes or audit["problems"]:
            raise RuntimeError("\n".join([*fleet.crashes, *map(str, audit["problems"])]))
        rates = [
            (int(line["eval/step"]), line["eval/success_rate"])
            for line in self._watch.lines()
            if "eval/step" in line
        ]
        return {
            "hosts": NUM_HOSTS,
            "lost": audit["lost"],
            "trained_twice": audit["trained_twice"],
            "tickets": audit["tickets"],
            "success_start": round(rates[0][1], 3),
            "success_end": round(rates[-1][1], 3),
            "success": [(step, round(rate, 3)) for step, rate in rates],
            "join_s": round(join_s, 2),
            "recoveries_s": recoveries,
        }

    async def _start(self) -> float:
        """Start all processes; return the seconds from the first hub's command to the first episode
        on the broker.
        """
        fleet = self._fleet
        settings = [f"run.name={RUN}", f"run.dir={self._folder / 'runs'}"]
        settings += [f"train.steps={self._steps}", "trackers.use=[]"]
        fleet.add("learner", "learner", "start", "configs/quickstart.yaml", *settings)
        for number in range(2):
            fleet.add("rollout", f"rollout-{number}", "--gpus", "cpu")
        fleet.add("rewardhub", "rewardhub-0")
        while True:
            if await self._is_waiting():
                break
            await asyncio.sleep(LOOK_EVERY_S)
        before = await self._num_ended()
        began = time.monotonic()
        fleet.add("envhub", "envhub-0")
        while True:
            if await self._num_ended() > before:
                break
            await asyncio.sleep(LOOK_EVERY_S)
        took = time.monotonic() - began
        fleet.add("envhub", "envhub-1")
        return took

    async def _is_waiting(self) -> bool:
        """Return whether tickets wait for a hub, and servers for requests."""
        depths = [await self._bus.depth(stream) for stream in (TICKETS, EVALTICKETS)]
        serving = all("answering at" in server.tail() for server in self._fleet.of("rollout"))
        return serving and sum(sum(depth.values()) for depth in depths) > 0

    async def _num_ended(self) -> int:
        return await self._bus.last_seq(SAMPLES) + await self._bus.last_seq(EVALS)

    async def _disturb(self) -> dict[str, float]:
        """Return the seconds of each recovery; a cut-off host counts from its return."""
        fleet = self._fleet
        took = dict[str, float]()
        for role in ("rollout", "envhub", "rewardhub", "learner"):
            took[role] = await self._recover(role, self._killer(fleet.of(role)[0]))
        took["broker"] = await self._recover("broker", fleet.restart_broker)
        for host in sorted(set(fleet.hosts.values())):
            took[f"host_{host}"] = (
                await self._recover(f"host {host}", partial(self._cut, host)) - self._cut_s
            )
        revoked = fleet.of("envhub")[1]
        fleet.revoke(revoked)
        took["revoked"] = await self._watch.until(lambda: revoked.has_ended, LIMIT_S)
        fleet.add("envhub", "envhub-2")
        return {name: round(seconds, 1) for name, seconds in took.items()}

    async def _recover(self, role: str, strike: Callable[[], Awaitable[None]]) -> float:
        step = self._watch.step()
        # back at work after the last one
        await self._watch.until(lambda: self._watch.step() > step, LIMIT_S)
        took = await self._watch.recovery_s(role, strike, LIMIT_S)
        print(f"step {self._watch.step()}: {role}, recovered after {took:.1f} s", flush=True)
        return took

    def _killer(self, victim: RunProcess) -> Callable[[], Awaitable[None]]:
        async def kill() -> None:
            victim.kill()

        return kill

    async def _cut(self, host: int) -> None:
        self._fleet.network.set_link(host, up=False)
        await asyncio.sleep(self._cut_s)
        self._fleet.network.set_link(host, up=True)
