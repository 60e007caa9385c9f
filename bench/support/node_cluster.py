"""Learners over several nodes, which are network namespaces, with a made-up fleet on node 0."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil

from bench.support import made_up_hub
from bench.support.hosts.network_namespaces import HostNetwork, entered, host_network
from broker.contract import wire
from broker.contract.streams import SAMPLES, TICKETS
from broker.jetstream.bus import Bus
from broker.server.private_server import BrokerServer
from broker.settings.runspec import validate
from learner.prepare import to_yaml

PORT: Final = 7100
PROMPT: Final = 6
GROUPS: Final = 4  # of a step
LONG_S: Final = 240.0
HEADS: Final = {"num_heads": 2, "num_kv_heads": 2, "head_dim": 8}
TINY: Final = {"hidden_size": 16, "num_layers": 1, **HEADS, "intermediate_size": 32}
LOSSES: Final = ("actor/pg_loss", "actor/grad_norm")


def small_run(folder: Path, name: str, **train: Any) -> dict[str, Any]:
    """Return the configuration of a run of five steps in float32 on the CPU, checked."""
    lake = {
        "env": "frozenlake",
        "group_size": 2,
        "max_turns": 4,
        "max_context_tokens": 64,
        "deadline_s": 20,
    }
    steps = {
        "steps": 5,
        "groups_per_step": GROUPS,
        "micro_batch_tokens": 64,
        "lr": 1e-3,
        "num_threads": 1,
    }
    return validate(
        {
            "run": {"name": name, "dir": str(folder), "seed": 3},
            "model": {"path": None, "tiny": TINY},
            "domains": {"lake": {**lake, "sampling": {"max_tokens": 8}}},
            "train": {**steps, "ticket_timeout_s": 60.0, "device": "cpu", **train},
            "rollout": {"max_context_tokens": 64},
            "checkpoint": {"every_steps": 1},
        }
    )


def answer(ticket: wire.Ticket) -> wire.Group:
    """Return a ticket's group, the same whoever asks: answers of one to eight tokens."""
    rng = np.random.default_rng(ticket.number)
    episodes = []
    for episode in range(2):
        sampled = int(rng.integers(1, 9))
        token_ids = rng.integers(6, 60, PROMPT + sampled).tolist()
        logprobs = rng.uniform(-4, -1, sampled).tolist()
        reward = float(episode)
        made = made_up_hub.trajectory(
            episode, token_ids, logprobs, version=ticket.min_version, reward=reward
        )
        episodes.append(made)
    return made_up_hub.group(ticket, episodes)


@asynccontextmanager
async def hub(
    url: str, run: str, before: Callable[[wire.Ticket], Awaitable[None]] | None = None
) -> AsyncIterator[Bus]:
    """Answer a run's tickets for as long as the block runs.

    Args:
        before: awaited before each answer.
    """
    bus = await Bus.connect(url, run, name=f"{run}-hub", deadline_s=60)
    await bus.ensure_streams()

    async def serve() -> None:
        queue = await bus.work_queue(TICKETS, "lake")
        while True:
            for delivery in await queue.fetch(1, 5.0):
                assert isinstance(delivery.message, wire.Ticket)
                if before is not None:
                    await before(delivery.message)
                await bus.publish(SAMPLES, answer(delivery.message), ticket=delivery.message.number)
                await delivery.ack()

    serving = asyncio.create_task(serve())
    try:
        yield bus
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        await bus.close()


class Gate:
    """Holds answers back after some steps of ``small_run``, so that a run is in its middle.

    Attributes:
        opened: set it to let the rest through.
    """

    def __init__(self, steps: int) -> None:
        self._most = GROUPS * steps
        self.opened = asyncio.Event()

    async def __call__(self, ticket: wire.Ticket) -> None:
        if ticket.number > self._most:
            await self.opened.wait()


class NodeProcess:
    """``rlearner start`` on one node, with what it started."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self.process = process
        self._log = log

    @property
    def log(self) -> str:
        """What it and its ranks have written."""
        return self._log.read_text()

    def ranks(self) -> list[psutil.Process]:
        """Return the processes of its ranks, without itself."""
        with suppress(psutil.NoSuchProcess):
            below = psutil.Process(self.process.pid).children(recursive=True)
            return [
                one
                for one in below
                if any("ranks.follower" in part or "nodes.rank" in part for part in one.cmdline())
            ]
        return []

    def kill(self) -> None:
        """Kill the process and its ranks, as when the node dies."""
        for one in (*self.ranks(), psutil.Process(self.process.pid)):
            with suppress(psutil.NoSuchProcess):
                one.send_signal(signal.SIGKILL)

    async def exit_code(self, within_s: float = LONG_S) -> int:
        """Wait for the process and return its exit code.

        Raises:
            TimeoutError: with the end of the log.
        """
        try:
            async with asyncio.timeout(within_s):
                return await self.process.wait()
        except TimeoutError:
            raise TimeoutError(f"still alive after {within_s} s: {self.log[-3000:]}") from None


class NodeCluster:
    """Nodes on a network, and the broker's address on node 0."""

    def __init__(self, network: HostNetwork, folder: Path, url: str) -> None:
        self.network = network
        self.folder = folder
        self.url = url
        self.processes: list[NodeProcess] = []
        self.rendezvous = f"{network.addresses[0]}:{PORT}"

    def write(self, config: dict[str, Any]) -> Path:
        """Write a configuration, and return the file."""
        file = self.folder / f"{config['run']['name']}.yaml"
        file.write_text(to_yaml(config))
        return file

    @property
    def key_options(self) -> list[str]:
        """Options of every node."""
        return ["--nodes-key", str(self.folder / "nodes.key"), "--nodes-deadline", "120"]

    def node_options(self, node: int, num_nodes: int) -> list[str]:
        """Return the options of a node."""
        known = [
            "--nnodes",
            str(num_nodes),
            "--node-rank",
            str(node),
            "--rendezvous",
            self.rendezvous,
        ]
        return [*known, *self.key_options]

    async def start(
        self,
        node: int,
        config: Path,
        *options: str,
        env: dict[str, str] | None = None,
        launcher: Sequence[str] = (sys.executable, "-m"),
    ) -> NodeProcess:
        """Start ``rlearner start`` on a node.

        Args:
            env: further variables.
            launcher: what runs the module.
        """
        log = self.folder / f"{config.stem}-{node}-{len(self.processes)}.log"
        command = [*launcher, "rlearner.cli", "start", str(config), "--broker", self.url, *options]
        # What a home has is each node's own, except for the broker's keys. So are its interfaces:
        # ranks that ran in this process have left theirs in its environment.
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("GLOO_", "NCCL_"))
        }
        own = {
            "OMP_NUM_THREADS": "1",
            "XDG_CACHE_HOME": str(self.folder / f"cache-{config.stem}-{node}"),
        }
        with log.open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                *self.network.inside(node),
                *command,
                stdout=output,
                stderr=output,
                env={**inherited, **own, **(env or {})},
            )
        made = NodeProcess(process, log)
        self.processes.append(made)
        return made

    async def start_all(self, config: Path, num_nodes: int = 2) -> list[NodeProcess]:
        """Start a learner over nodes, as their supervisors do."""
        return [
            await self.start(node, config, *self.node_options(node, num_nodes))
            for node in range(num_nodes)
        ]

    def clear(self) -> None:
        """Kill what is left of all processes."""
        for one in self.processes:
            if one.process.returncode is None:
                one.kill()
        self.processes.clear()


@contextmanager
def node_cluster(folder: Path, num_nodes: int = 2) -> Iterator[NodeCluster]:
    """Yield nodes with a broker on node 0, whose namespace the calling thread enters."""
    with (
        host_network(num_nodes) as network,
        entered(network.hosts[0]),
        BrokerServer(str(folder / "store"), store_max_gib=64) as server,
    ):
        made = NodeCluster(network, folder, server.url)
        try:
            yield made
        finally:
            made.clear()


def steps_of(folder: Path, run: str) -> list[dict[str, Any]]:
    """Return the lines of a run's metrics, one per step."""
    with suppress(FileNotFoundError):
        return [
            json.loads(line) for line in (folder / run / "metrics.jsonl").read_text().splitlines()
        ]
    return []


def largest_difference(one: Sequence[dict[str, Any]], other: Sequence[dict[str, Any]]) -> float:
    """Return the largest difference of losses and gradient norms, step by step.

    Raises:
        ValueError: if the steps are not the same.
    """
    pairs = zip(one, other, strict=True)
    return max(abs(float(a[name]) - float(b[name])) for a, b in pairs for name in LOSSES)


async def reach(
    folder: Path,
    run: str,
    step: int,
    processes: Sequence[NodeProcess] = (),
    within_s: float = LONG_S,
) -> None:
    """Wait until a run has made a step.

    Args:
        processes: that must not end before.

    Raises:
        TimeoutError: if it has not.
        RuntimeError: if a process has ended; with what it has written.
    """
    deadline = time.monotonic() + within_s
    while len(steps_of(folder, run)) < step:
        if time.monotonic() > deadline:
            raise TimeoutError(f"run {run} did not reach step {step} within {within_s:g} s")
        for one in processes:
            if one.process.returncode is not None:
                raise RuntimeError(
                    f"a process ended with code {one.process.returncode}:\n{one.log}"
                )
        await asyncio.sleep(0.02)
