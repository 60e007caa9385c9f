"""Three brokers of one cluster on loopback, each of which may be killed and started again on its
own store.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from bench.support.fleet import RunFleet, free_port
from broker.contract.streams import STREAMS
from broker.jetstream.api import call_api
from broker.jetstream.bus import Bus
from broker.jetstream.provision import stream_config
from broker.server.private_server import BrokerServer, ClusterConfig
from broker.system.connections import is_loopback

NODES = 3


class ClusterNodes:
    """The servers, numbered from 0.

    Args:
        folder: of their stores.
        binary: another nats-server than the one that is found.
        bind: the address of all of them.
    """

    def __init__(self, folder: Path, binary: str | None = None, bind: str = "127.0.0.1") -> None:
        self._folder, self._binary, self._bind = folder, binary, bind
        self.ports = [free_port(bind) for _ in range(NODES)]
        self._cluster_ports = [free_port(bind) for _ in range(NODES)]
        self._monitor_ports = [free_port(bind) for _ in range(NODES)]
        self.servers: list[BrokerServer | None] = [None] * NODES

    @property
    def url(self) -> str:
        """Of all of them."""
        return ",".join(
            f"{'nats' if is_loopback(self._bind) else 'tls'}://{self._bind}:{port}"
            for port in self.ports
        )

    def start(self, number: int) -> None:
        """Start one, on the ports and the store that are its own."""
        routes = tuple(
            f"{self._bind}:{port}"
            for other, port in enumerate(self._cluster_ports)
            if other != number
        )
        cluster = ClusterConfig(
            "test",
            f"n{number}",
            self._cluster_ports[number],
            routes,
            monitor=self._monitor_ports[number],
        )
        server = BrokerServer(
            str(self._folder / f"n{number}"),
            keys=str(self._folder / "keys"),
            port=self.ports[number],
            bind=self._bind,
            binary=self._binary,
            cluster=cluster,
        )
        server.start()
        self.servers[number] = server

    def start_all(self) -> None:
        for number in range(NODES):
            self.start(number)

    def kill(self, number: int) -> None:
        """SIGKILL."""
        server = self.servers[number]
        assert server is not None
        os.kill(server.pid, signal.SIGKILL)

    async def restart(self, number: int, after_s: float) -> None:
        """SIGKILL, and some time later the same again on the same store."""
        self.kill(number)
        await asyncio.sleep(after_s)
        await asyncio.to_thread(self.start, number)

    async def settled(self, bus: Bus) -> None:
        """Until another server may be lost."""
        await settled(bus, [f"{self._bind}:{port}" for port in self._monitor_ports])

    def stop(self) -> None:
        for server in self.servers:
            if server is not None:
                server.stop()


async def settled(bus: Bus, monitors: list[str], within_s: float = 60.0) -> None:
    """Until every stream and bucket of the bus's run has all its replicas up to date, so that
    another server may be lost.

    The leader of a stream counts what a replica has of the Raft log; only the replica itself knows
    whether it still copies records behind a snapshot of that, and says so by its health.

    Args:
        monitors: ``host:port`` of each server's monitoring pages.

    Raises:
        TimeoutError: not in time; names the server or the stream.
    """
    deadline = time.monotonic() + within_s
    for monitor in monitors:
        while why := await asyncio.to_thread(_unhealthy, monitor):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{monitor}: {why}")
            await asyncio.sleep(0.2)
    for name in [
        str(config["name"]) for stream in STREAMS if (config := stream_config(stream, bus.run))
    ]:
        while not _complete((await call_api(bus.link, f"STREAM.INFO.{name}"))["cluster"]):
            if time.monotonic() > deadline:
                raise TimeoutError(name)
            await asyncio.sleep(0.2)


def _unhealthy(monitor: str) -> str:
    """What a server says is not well with it, empty when all is."""
    try:
        with urllib.request.urlopen(f"http://{monitor}/healthz", timeout=5) as answer:
            return "" if answer.status == 200 else str(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.read().decode(errors="replace") or str(error)
    except OSError as error:
        return str(error)


def _complete(cluster: dict[str, Any]) -> bool:
    replicas = cluster.get("replicas", [])
    current = [one for one in replicas if one.get("current") and not one.get("offline")]
    return bool(cluster.get("leader")) and len(current) == NODES - 1


class ClusterFleet(RunFleet):
    """A fleet on a cluster of three brokers."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.nodes = ClusterNodes(self.folder / "cluster", os.environ.get("RL_TEST_NATS_SERVER"))

    @property
    def url(self) -> str:
        return self.nodes.url

    def start_broker(self) -> None:
        self.nodes.start_all()

    async def __aexit__(self, *exception: object) -> None:
        await super().__aexit__(*exception)
        await asyncio.to_thread(self.nodes.stop)
