"""Turns on a device against a real broker, and a whole run whose learner and server share one
host's memory.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from waits import LONG_S, until

from broker.contract import wire
from broker.contract.streams import DEVICES
from broker.jetstream.bus import Bus
from broker.runtime.device_party import TTL_S
from broker.runtime.shared_devices import SharedDevices
from broker.settings.run_address import noted_address
from broker.system.devices import device_names, host_name

QUICKSTART = str(Path("configs/quickstart.yaml").absolute())
COMMAND = [sys.executable, "-m", "rlearner.cli"]
TINY = "model.tiny={hidden_size: 32, num_layers: 2, num_heads: 2, num_kv_heads: 1, head_dim: 16, intermediate_size: 48}"
SMALL = (
    *(
        "train.groups_per_step=2",
        "warm_start.steps=4",
        "warm_start.episodes=16",
        "domains.lake.group_size=4",
    ),
    *(
        "eval.every_steps=0",
        "envhub.n=16",
        "rollout.max_running=16",
        "checkpoint.every_steps=2",
        TINY,
    ),
)


class Party:
    """One process on devices."""

    def __init__(
        self, bus: Bus, name: str, *, exclusive: bool, devices: tuple[str, ...] = ("gpu",)
    ) -> None:
        self.shared = SharedDevices(bus, devices, name, exclusive=exclusive, ttl_s=4.0)
        self.waiting: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        self.waiting = asyncio.create_task(self.shared.acquire())

    async def has(self, within_s: float = LONG_S) -> bool:
        assert self.waiting is not None
        done, _ = await asyncio.wait([self.waiting], timeout=within_s)
        return bool(done) and self.shared.held

    async def die(self) -> None:
        """End as by kill -9: nothing is withdrawn."""
        for task in self.shared._tasks:
            task.cancel()
        await asyncio.gather(*self.shared._tasks, return_exceptions=True)
        self.shared._tasks = []


@pytest.fixture
async def parties(bus: Bus) -> AsyncIterator[list[Party]]:
    """A learner and two servers on one GPU."""
    made = [
        Party(bus, "learner", exclusive=True),
        *(Party(bus, f"s{n}", exclusive=False) for n in (1, 2)),
    ]
    for one in made:
        await one.shared.start()
    yield made
    for one in made:
        with suppress(asyncio.CancelledError):
            await one.shared.close()
        if one.waiting is not None:
            one.waiting.cancel()


async def test_a_learner_and_servers_take_turns(parties: list[Party]) -> None:
    learner, *servers = parties
    await learner.begin()
    assert await learner.has()
    for _ in range(3):
        for server in servers:
            await server.begin()
        await asyncio.wait_for(learner.shared.until_asked(), LONG_S)
        assert not await servers[0].has(within_s=0.3)
        await learner.shared.release()
        assert [await server.has() for server in servers] == [True, True]
        assert not learner.shared.held
        assert not any(server.shared.asked for server in servers)
        await learner.begin()
        for server in servers:
            await asyncio.wait_for(server.shared.until_asked(), LONG_S)
        await servers[0].shared.release()
        assert not await learner.has(within_s=0.3)  # the other server has not left
        await servers[1].shared.release()
        assert await learner.has()


async def test_a_dead_holder_frees_the_device(parties: list[Party]) -> None:
    learner, server, _ = parties
    await server.begin()
    assert await server.has()
    await server.die()
    await learner.begin()
    assert await learner.has()
    assert not server.shared.held


async def test_processes_on_several_devices_do_not_wait_for_each_other(bus: Bus) -> None:
    wanted = {"l1": ("gpu1", "gpu2"), "l2": ("gpu2", "gpu1"), "s1": ("gpu1",), "s2": ("gpu2",)}
    made = [
        Party(bus, name, exclusive=name[0] == "l", devices=devices)
        for name, devices in wanted.items()
    ]
    for party in made:
        await party.shared.start()

    async def works(party: Party) -> None:
        for _ in range(3):
            await party.shared.acquire()
            await asyncio.sleep(0.02)
            await party.shared.release()

    async with asyncio.timeout(LONG_S):
        await asyncio.gather(*(works(party) for party in made))
    for party in made:
        await party.shared.close()


def test_devices_are_named_by_uuid_or_host() -> None:
    found = {0: "GPU-0a1b", 1: "GPU-77ff"}
    assert device_names("0-1", {}, lambda: found) == ["GPU-0a1b", "GPU-77ff"]
    assert device_names("auto", {}, lambda: found) == ["GPU-0a1b", "GPU-77ff"]
    assert device_names("auto", {"CUDA_VISIBLE_DEVICES": "1"}, lambda: found) == ["GPU-77ff"]
    assert device_names("auto", {"CUDA_VISIBLE_DEVICES": "GPU-0a"}, lambda: found) == ["GPU-0a1b"]
    assert device_names("auto", {"CUDA_VISIBLE_DEVICES": ""}, lambda: found) == [host_name()]
    assert device_names("cpu", {}, lambda: found) == device_names("auto", {}, dict) == [host_name()]


async def holder(bus: Bus) -> str:
    """Who has the host's memory."""
    found = await bus.key_value(DEVICES).get(f"{bus.run}.{host_name()}")
    claims = found[0].claims if found is not None and isinstance(found[0], wire.DeviceLease) else []
    return next((claim.holder for claim in claims if claim.granted), "")


def steps_of(folder: Path) -> list[dict[str, float]]:
    """The metrics of each step so far; the last line may be half written."""
    file = folder / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def pid_of(parent: int, module: str, first: str) -> int:
    """The child that runs a module with this first argument; others come and go."""
    for child in psutil.Process(parent).children():
        with suppress(psutil.Error):
            line = child.cmdline()
            if line[2:4] == [module, first]:
                return child.pid
    raise AssertionError(f"{module} does not run")


@pytest.mark.timeout(240)
async def test_a_run_takes_turns_and_loses_nothing_when_a_holder_is_killed(tmp_path: Path) -> None:
    folder = tmp_path / "shared"
    config = [QUICKSTART, f"run.dir={tmp_path}", "run.name=shared", "train.steps=8", *SMALL]
    up = await asyncio.create_subprocess_exec(
        *COMMAND, "up", *config, "--share-gpus",
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    try:
        await until(lambda: len(steps_of(folder)) > 1)
        bus = await Bus.connect(noted_address(folder), "shared", name="test", deadline_s=LONG_S)
        for role, module, first in (
            ("learner", "rlearner.cli", "start"),
            ("rollout", "rollout.cli", "--id"),
        ):

            async def has_it(role: str = role) -> bool:
                return (await holder(bus)).startswith(role)

            await until(has_it)
            killed = await holder(bus)
            os.kill(pid_of(up.pid, module, first), signal.SIGKILL)

            async def is_over(killed: str = killed) -> bool:
                return await holder(bus) not in (killed, "")

            await until(is_over, TTL_S + LONG_S)
        await bus.close()
        out, _ = await asyncio.wait_for(up.communicate(), 3 * LONG_S)
    finally:
        if up.returncode is None:
            up.terminate()
            print((await up.communicate())[0].decode())  # what happened, if the test fails
    assert up.returncode == 0, out.decode()
    lines = steps_of(folder)
    assert [line["step"] for line in lines] == list(range(1, 9))
    assert sum(line["turns/count"] for line in lines) > 2  # a turn may train several steps
    assert all(line["time/turn_wait"] > 0 for line in lines if line["turns/count"])
    logs = {file.name: file.read_text() for file in (folder / "logs").iterdir()}
    assert "asleep after" in logs["rollout-server.log"]
    assert [name for name, text in logs.items() if "Traceback" in text] == []
    audit = await asyncio.create_subprocess_exec(
        *COMMAND, "audit", str(folder), stdout=asyncio.subprocess.PIPE
    )
    said = (await audit.communicate())[0].decode().split()
    assert audit.returncode == 0
    assert said[said.index("lost") + 1] == said[said.index("trained_twice") + 1] == "0"
