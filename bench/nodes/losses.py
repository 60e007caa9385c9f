"""Losses over two nodes against one process, and the time to recover from a node's death."""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from pathlib import Path
from typing import Any, Final

from bench.support.hosts.network_namespaces import why_not
from bench.support.node_cluster import (
    Gate,
    NodeCluster,
    NodeProcess,
    hub,
    largest_difference,
    node_cluster,
    reach,
    small_run,
    steps_of,
)

NODES: Final = 2
RANKS: Final = 4
KILLED_AFTER: Final = 2  # steps


class Supervisor:
    """Starts a node's process again when it ends with another code than 0, as systemd does."""

    def __init__(self, cluster: NodeCluster, node: int, config: Path) -> None:
        self._cluster = cluster
        self._node = node
        self._config = config
        self.now: NodeProcess | None = None

    async def run(self) -> None:
        """Return once the process has ended with code 0.

        Raises:
            RuntimeError: if it ends with a user error.
        """
        while True:
            options = self._cluster.node_options(self._node, NODES)
            self.now = await self._cluster.start(self._node, self._config, *options)
            code = await self.now.exit_code()
            if code == 0:
                return
            if code == 2:
                raise RuntimeError(self.now.log[-2000:])


def measure(folder: Path, runs: int) -> dict[str, Any]:
    """Return the figures.

    Raises:
        SystemExit: if there can be no network namespaces here.
    """
    if problem := why_not():
        sys.exit(f"python -m bench.nodes: {problem}")
    with node_cluster(folder, NODES) as cluster:
        differences, seconds = asyncio.run(_measure(cluster, runs))
    print(f"recovered in {', '.join(f'{one:.1f}' for one in seconds)} s", file=sys.stderr)
    return {
        "nodes": NODES,
        "ranks": RANKS,
        "max_loss_difference": max(differences),
        "recover_s": round(statistics.median(seconds), 2),
    }


async def _measure(cluster: NodeCluster, runs: int) -> tuple[list[float], list[float]]:
    async with hub(cluster.url, "one"):
        alone = await cluster.start(0, cluster.write(small_run(cluster.folder, "one")))
        if await alone.exit_code():
            raise RuntimeError(alone.log[-2000:])
    expected = steps_of(cluster.folder, "one")
    done = [await _one_run(cluster, f"nodes-{number}") for number in range(runs)]
    return [largest_difference(expected, steps_of(cluster.folder, run)) for run, _ in done], [
        took for _, took in done
    ]


async def _one_run(cluster: NodeCluster, run: str) -> tuple[str, float]:
    """Run with the death of node 1 in the middle; return the run's name and the seconds until its
    next step.
    """
    config = cluster.write(small_run(cluster.folder, run, backend="ddp", ranks=RANKS))
    gate = Gate(KILLED_AFTER)
    supervisors = [Supervisor(cluster, node, config) for node in range(NODES)]
    async with hub(cluster.url, run, gate), asyncio.TaskGroup() as tasks:
        for one in supervisors:
            tasks.create_task(one.run())
        await reach(cluster.folder, run, KILLED_AFTER)
        assert supervisors[1].now is not None
        supervisors[1].now.kill()
        killed_at = time.monotonic()
        gate.opened.set()
        await reach(cluster.folder, run, KILLED_AFTER + 1)
        took = time.monotonic() - killed_at
    return run, took
