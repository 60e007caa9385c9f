"""Creates and removes network namespaces that stand for hosts, each with an address on one bridge.
Needs root.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from typing import Final

_serial = itertools.count()

CLONE_NEWNET: Final = 0x40000000
NETWORK: Final = "10.78.0"  # host n has the address 10.78.0.(n + 1)


class HostNetwork:
    """Hosts on a bridge that is in a namespace of its own, so that nothing of the machine's network
    is touched.

    Attributes:
        hosts: names of the namespaces.
        addresses: of the hosts, on their interface eth0.
    """

    def __init__(self, num_hosts: int) -> None:
        stem = f"rlh-{os.getpid()}-{next(_serial)}"
        self.bridge = f"{stem}-bridge"
        self.hosts = [f"{stem}-{number}" for number in range(num_hosts)]
        self.addresses = [f"{NETWORK}.{number + 1}" for number in range(num_hosts)]

    def create(self) -> None:
        """Create the namespaces, the bridge and the links.

        Raises:
            subprocess.CalledProcessError: if this is not permitted; what was created is removed
                again.
        """
        try:
            for name in (self.bridge, *self.hosts):
                ip("netns", "add", name)
                ip("-n", name, "link", "set", "lo", "up")
            ip("-n", self.bridge, "link", "add", "br0", "type", "bridge")
            ip("-n", self.bridge, "link", "set", "br0", "up")
            for number, (name, address) in enumerate(zip(self.hosts, self.addresses, strict=True)):
                port = f"host{number}"
                ip(
                    "-n",
                    self.bridge,
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
                ip("-n", self.bridge, "link", "set", port, "master", "br0")
                ip("-n", self.bridge, "link", "set", port, "up")
                ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
                ip("-n", name, "link", "set", "eth0", "up")
        except subprocess.CalledProcessError:
            self.remove()
            raise

    def remove(self) -> None:
        """Remove everything that exists of it; processes inside keep running without a network."""
        for name in (self.bridge, *self.hosts):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)

    def inside(self, host: int) -> list[str]:
        """Return what to put before a command that runs on that host."""
        return ["nsenter", f"--net=/run/netns/{self.hosts[host]}"]

    def set_link(self, host: int, *, up: bool) -> None:
        """Connect a host to the bridge, or cut it off."""
        ip("-n", self.bridge, "link", "set", f"host{host}", "up" if up else "down")


def why_not() -> str:
    """Return why there can be no such network here, empty if there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if missing := [name for name in ("ip", "nsenter", "unshare") if shutil.which(name) is None]:
        return f"not installed: {', '.join(missing)}"
    try:
        with host_network(1):
            return ""
    except subprocess.CalledProcessError as error:
        return f"not permitted here: {' '.join(error.cmd)}: {error.stderr.strip()}"


@contextlib.contextmanager
def host_network(num_hosts: int) -> Iterator[HostNetwork]:
    """Create a network, and remove it at the end."""
    network = HostNetwork(num_hosts)
    network.create()
    try:
        yield network
    finally:
        network.remove()


@contextlib.contextmanager
def entered(name: str) -> Iterator[None]:
    """Put the calling thread, and what it starts, into a network namespace, and back at the end."""
    before = os.open(f"/proc/self/task/{threading.get_native_id()}/ns/net", os.O_RDONLY)
    inside = os.open(f"/run/netns/{name}", os.O_RDONLY)
    try:
        _enter(inside)
        try:
            yield
        finally:
            _enter(before)
    finally:
        os.close(before)
        os.close(inside)


def _enter(descriptor: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")


def ip(*arguments: str) -> None:
    """Run ``ip`` of iproute2."""
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
