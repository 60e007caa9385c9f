"""Brokers in network namespaces of their own, so that single links to them can be cut without a
word: packets vanish, nothing is reset.

Everything else, loopback included, lives in one more namespace that the calling thread enters; what
it starts is born there. Needs root, ``ip`` and ``nft``.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from bench.support.hosts.network_namespaces import entered

# node n has the addresses 10.77.n.1 and up, the namespace of all the others 10.77.255.254
NETWORK: Final = "10.77"
MONITOR_PORT: Final = 8222
TABLE: Final = (
    "table inet cut { chain in { type filter hook input priority 0; policy accept; }; "
    "chain out { type filter hook output priority 0; policy accept; }; }"
)


def why_not() -> str:
    """Why there can be no such network here, empty if there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if missing := [name for name in ("ip", "nft", "nsenter") if shutil.which(name) is None]:
        return f"not installed: {', '.join(missing)}"
    name = f"rl-try-{os.getpid()}"
    try:
        _run("ip", "netns", "add", name)
        try:
            _run("ip", "-n", name, "link", "add", "br0", "type", "bridge")
            _run("nsenter", f"--net=/run/netns/{name}", "nft", TABLE)
        finally:
            _run("ip", "netns", "del", name)
    except subprocess.CalledProcessError as error:
        return f"not permitted here: {' '.join(error.cmd)}: {error.stderr.strip()}"
    return ""


class NamespaceNetwork:
    """A bridge with ``num_nodes`` namespaces on it, one for each broker."""

    def __init__(self, num_nodes: int) -> None:
        stem = f"rl-{os.getpid()}-{threading.get_native_id()}"
        self.home = f"{stem}-home"
        self.nodes = [f"{stem}-{number}" for number in range(num_nodes)]
        self._used = [0] * num_nodes

    def create(self) -> None:
        """Make all of it."""
        for name in (self.home, *self.nodes):
            _run("ip", "netns", "add", name)
            _run("ip", "-n", name, "link", "set", "lo", "up")
            self._nft(name, TABLE)
        _run("ip", "-n", self.home, "link", "add", "br0", "type", "bridge")
        _run("ip", "-n", self.home, "addr", "add", f"{NETWORK}.255.254/16", "dev", "br0")
        _run("ip", "-n", self.home, "link", "set", "br0", "up")
        for number, name in enumerate(self.nodes):
            port = f"node{number}"
            _run(
                "ip",
                "-n",
                self.home,
                "link",
                "add",
                port,
                "type",
                "veth",
                "peer",
                "name",
                "eth0",
                "netns",
                name,
            )
            _run("ip", "-n", self.home, "link", "set", port, "master", "br0")
            _run("ip", "-n", self.home, "link", "set", port, "up")
            _run("ip", "-n", name, "link", "set", "eth0", "up")
            self.address(number)

    def destroy(self) -> None:
        for name in (self.home, *self.nodes):
            _run("ip", "netns", "del", name)

    def address(self, node: int = 0) -> str:
        """One more address of that node, for one client alone: cutting it cuts that client from the
        node.
        """
        self._used[node] += 1
        address = f"{NETWORK}.{node}.{self._used[node]}"
        _run("ip", "-n", self.nodes[node], "addr", "add", f"{address}/16", "dev", "eth0")
        return address

    def inside(self, node: int) -> list[str]:
        """What to put before a command that is to run on that node."""
        return ["nsenter", f"--net=/run/netns/{self.nodes[node]}"]

    def cut(self, address: str) -> None:
        """Whatever goes to or comes from this address of a node vanishes."""
        node = self.nodes[int(address.split(".")[2])]
        self._nft(
            node,
            f"add rule inet cut in ip daddr {address} drop; add rule inet cut out ip saddr {address} drop",
        )

    def isolate(self, node: int, others: list[int]) -> None:
        """Whatever this node sends to the others, or they to it, vanishes; clients still reach it."""
        for other in others:
            name, net = self.nodes[node], f"{NETWORK}.{other}.0/24"
            self._nft(
                name,
                f"add rule inet cut in ip saddr {net} drop; add rule inet cut out ip daddr {net} drop",
            )

    def cut_port(self, port: int) -> None:
        """Whatever goes to or comes from this TCP port on loopback vanishes."""
        self._nft(
            self.home,
            f"add rule inet cut in tcp dport {port} drop; add rule inet cut in tcp sport {port} drop",
        )

    def heal(self) -> None:
        """Everything passes again."""
        for name in (self.home, *self.nodes):
            self._nft(name, "flush table inet cut")

    def _nft(self, name: str, rules: str) -> None:
        _run("nsenter", f"--net=/run/netns/{name}", "nft", rules)


@contextlib.contextmanager
def network(num_nodes: int) -> Iterator[NamespaceNetwork]:
    """A network, with the calling thread, and what it starts from now on, in the namespace that
    reaches all nodes.
    """
    made = NamespaceNetwork(num_nodes)
    os.environ["RL_INSECURE"] = "1"  # the brokers have neither TLS nor logins
    try:
        made.create()
        with entered(made.home):
            yield made
    finally:
        made.destroy()
        del os.environ["RL_INSECURE"]


def broker_configuration(store: Path, max_payload: int, cluster: str = "") -> str:
    """Of a nats-server that listens on every address of its namespace, where nobody else is."""
    return (
        f'host: "0.0.0.0"\nport: 4222\nhttp: "0.0.0.0:{MONITOR_PORT}"\nmax_payload: {max_payload}\n'
        f'jetstream {{\n  store_dir: "{store}"\n  max_file_store: {4 << 30}\n}}\n{cluster}'
    )


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
