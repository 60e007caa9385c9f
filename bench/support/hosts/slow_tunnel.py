"""A slow link between two network namespaces: a process that delays and limits the packets of two
TUN devices.

    python -m bench.support.hosts.slow_tunnel NAMESPACE_A NAMESPACE_B DELAY_MS MBIT_PER_S MTU

It does what netem does, which not every kernel has: each direction has a rate, a delay and a queue
of limited length whose overflow is dropped. The ends are 10.79.0.1 and 10.79.0.2 on the interface
``slow``. It prints a line when the link is up, and ends with its parent, or when its standard input
is closed.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import select
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from typing import Final

from bench.support.hosts.network_namespaces import HostNetwork, ip

ENDS: Final = ("10.79.0.1", "10.79.0.2")
CLONE_NEWNET: Final = 0x40000000
TUNSETIFF: Final = 0x400454CA
IFF_TUN: Final = 0x0001
IFF_NO_PI: Final = 0x1000
ETHERNET_MTU: Final = 1500
# of loopback: few packets, so that a fast link costs this process little
LARGEST_MTU: Final = 65_535
QUEUE_S: Final = 0.2  # packets that would wait longer for the link are dropped


class Direction:
    """Packets of at most ``mtu`` bytes from one device to the other."""

    def __init__(
        self, source: int, target: int, delay_s: float, bytes_per_s: float, mtu: int
    ) -> None:
        self.source = source
        self.target = target
        self._delay_s = delay_s
        self._rate = bytes_per_s
        self._mtu = mtu
        self._free_at = 0.0  # when the link has sent all that is queued
        self._queue: deque[tuple[float, bytes]] = deque()

    def read(self) -> None:
        """Take the packets that wait at the source."""
        with contextlib.suppress(BlockingIOError):
            while True:
                packet = os.read(self.source, self._mtu)
                now = time.monotonic()
                if self._free_at - now <= QUEUE_S:
                    self._free_at = max(self._free_at, now) + len(packet) / self._rate
                    self._queue.append((self._free_at + self._delay_s, packet))

    def deliver(self) -> float:
        """Hand over the packets that have arrived; return when the next one does."""
        while self._queue:
            at, packet = self._queue[0]
            if at > time.monotonic():
                return at
            self._queue.popleft()
            with contextlib.suppress(OSError):  # the other end is down
                os.write(self.target, packet)
        return float("inf")


@contextlib.contextmanager
def slow_tunnel(
    network: HostNetwork, *, delay_ms: float, mbit_per_s: float, mtu: int = ETHERNET_MTU
) -> Iterator[tuple[str, str]]:
    """Connect the first two hosts by one more link; yield their addresses on it.

    Args:
        delay_ms: of each direction.
        mbit_per_s: of each direction.
        mtu: bytes of the largest packet.
    """
    command = [
        sys.executable,
        "-m",
        __name__,
        *network.hosts[:2],
        str(delay_ms),
        str(mbit_per_s),
        str(mtu),
    ]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None, "a pipe was asked for"
    assert process.stdout is not None, "a pipe was asked for"
    try:
        if not process.stdout.readline():
            raise RuntimeError("the slow link could not be made")
        yield ENDS
    finally:
        process.stdin.close()
        process.wait(10)
        process.stdout.close()


def _device(namespace: str, address: str, mtu: str) -> int:
    """Create the interface ``slow`` in a namespace and return its packets' descriptor."""
    with open(f"/run/netns/{namespace}", "rb") as there:
        _enter(there.fileno())
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", b"slow", IFF_TUN | IFF_NO_PI))
    ip("addr", "add", f"{address}/30", "dev", "slow")
    ip("link", "set", "slow", "up", "txqueuelen", "1000", "mtu", mtu)
    return device


def _enter(descriptor: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")


def main() -> None:
    """Carry packets until the standard input is closed."""
    first, second, delay_ms, mbit_per_s, mtu = sys.argv[1:]
    here = _device(first, ENDS[0], mtu)
    far = _device(second, ENDS[1], mtu)
    delay_s = float(delay_ms) / 1000
    rate = float(mbit_per_s) * 1e6 / 8
    there = Direction(here, far, delay_s, rate, int(mtu))
    back = Direction(far, here, delay_s, rate, int(mtu))
    poller = select.epoll()
    for descriptor in (here, far, sys.stdin.fileno()):
        poller.register(descriptor, select.EPOLLIN)
    print("up", flush=True)
    while True:
        wait_s = min(there.deliver(), back.deliver()) - time.monotonic()
        ready = dict(poller.poll(max(0.0, min(wait_s, 1.0))))
        if sys.stdin.fileno() in ready:
            return
        for direction in (there, back):
            if direction.source in ready:
                direction.read()


if __name__ == "__main__":
    main()
