"""Counts sent and received bytes, to tell a slow connection from a broker that does not answer."""

from __future__ import annotations

import fcntl
import struct
import sys
import termios
from typing import Final

from broker.nats.client import GuardedClient

# Linux: bytes in the socket's send queue that the peer has not acknowledged
_SIOCOUTQ: Final = termios.TIOCOUTQ


class TrafficCounter:
    """Counts the bytes of a nats-py client.

    Headers and protocol are not counted exactly, so only compare two readings: bytes moved if
    either number grew.
    """

    def __init__(self) -> None:
        self._client: GuardedClient | None = None
        self._written = 0

    def watch(self, client: GuardedClient) -> None:
        """Count the bytes of this client from now on."""
        self._client = client
        self._written = 0

    def wrote(self, num_bytes: int) -> None:
        """Count payload bytes handed to the client."""
        self._written += num_bytes

    def now(self) -> tuple[int, int]:
        """Return the bytes that have left and reached this machine, including those of incomplete
        messages.
        """
        client = self._client
        if client is None:
            return 0, 0
        # no public name for an incomplete message
        received = client.stats["in_bytes"] + len(client._ps.buf)
        return self._written - self._unsent(client), received

    def moved_since(self, earlier: tuple[int, int]) -> bool:
        """Whether any byte was sent or received since that reading."""
        num_sent, num_received = self.now()
        return num_sent > earlier[0] or num_received > earlier[1]

    def _unsent(self, client: GuardedClient) -> int:
        """Return the bytes waiting in the client, in the event loop's transport and, on Linux, in
        the kernel.
        """
        writer = getattr(client._transport, "_io_writer", None)
        waiting: int = client._pending_data_size
        if writer is None or writer.transport.is_closing():
            return waiting
        waiting += writer.transport.get_write_buffer_size()
        sock = writer.get_extra_info("socket")
        if sys.platform == "linux" and sock is not None and sock.fileno() >= 0:
            waiting += struct.unpack("i", fcntl.ioctl(sock.fileno(), _SIOCOUTQ, bytes(4)))[0]
        return waiting
