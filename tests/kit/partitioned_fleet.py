"""A fleet whose brokers sit in network namespaces: every process reaches them by addresses of its
own, which can be cut.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from broker_cluster import settled
from network_namespaces import MONITOR_PORT, NamespaceNetwork, broker_configuration

from bench.support.fleet import RunFleet, RunProcess
from broker.contract import wire
from broker.jetstream.bus import Bus
from broker.server.private_server import HEADROOM_BYTES, find_binary
from broker.system.children import spawn

PORT: Final = 4222
CLUSTER_PORT: Final = 6222
READY_WITHIN_S: Final = 20.0


@dataclass
class PartitionedFleet(RunFleet):
    """One broker for each node of the network; several form a cluster.

    Attributes:
        addresses: by the name of a process, the brokers' addresses that it alone uses.
    """

    network: NamespaceNetwork = field(default_factory=lambda: NamespaceNetwork(1))
    addresses: dict[str, list[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._own = [f"10.77.{node}.1" for node in range(len(self.network.nodes))]
        self._current = self._own
        self._brokers: list[subprocess.Popen[bytes]] = []

    @property
    def url(self) -> str:
        return ",".join(f"nats://{address}:{PORT}" for address in self._current)

    @property
    def broker_pid(self) -> int:
        return self._brokers[0].pid

    def start_broker(self) -> None:
        for node in range(len(self.network.nodes)):
            self._brokers.append(self._start_node(node))
        for address in self._own:
            _wait_listening(address)

    def add(self, role: str, name: str, *arguments: str) -> RunProcess:
        self.addresses[name] = self._current = [
            self.network.address(node) for node in range(len(self.network.nodes))
        ]
        try:
            return super().add(role, name, *arguments)
        finally:
            self._current = self._own

    def cut(self, name: str) -> None:
        """Cut one process from every broker."""
        for address in self.addresses[name]:
            self.network.cut(address)

    async def settled(self, bus: Bus) -> None:
        """Until another of the brokers may be cut off."""
        await settled(bus, [f"{address}:{MONITOR_PORT}" for address in self._own])

    async def __aexit__(self, *exception: object) -> None:
        await super().__aexit__(*exception)
        for broker in self._brokers:
            os.kill(broker.pid, signal.SIGKILL)
            broker.wait()

    def _start_node(self, node: int) -> subprocess.Popen[bytes]:
        store = self.folder / f"broker-{node}"
        store.mkdir(exist_ok=True)
        configuration = store / "nats-server.conf"
        configuration.write_text(
            broker_configuration(
                store, wire.MAX_PAYLOAD_BYTES + HEADROOM_BYTES, self._cluster(node)
            )
        )
        binary = find_binary(os.environ.get("RL_TEST_NATS_SERVER"))
        with Path(store / "nats-server.out").open("ab") as log:
            return spawn([*self.network.inside(node), binary, "-c", str(configuration)], log)

    def _cluster(self, node: int) -> str:
        if len(self._own) == 1:
            return ""
        routes = ", ".join(f'"nats://{address}:{CLUSTER_PORT}"' for address in self._own)
        listen = f'listen: "{self._own[node]}:{CLUSTER_PORT}"\n  no_advertise: true'
        return f'server_name: "n{node}"\ncluster {{\n  name: "test"\n  {listen}\n  routes: [{routes}]\n}}\n'


def _wait_listening(address: str) -> None:
    deadline = time.monotonic() + READY_WITHIN_S
    while True:
        try:
            socket.create_connection((address, PORT), timeout=1).close()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        else:
            return
