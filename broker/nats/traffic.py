"""What one connection has sent and received: tells a slow link, whose bytes still move, from a broker that does not
answer.
"""

from __future__ import annotations

import fcntl
import struct
import sys
import termios
from typing import Final

from broker.nats.client import GuardedClient

_SIOCOUTQ: Final = termios.TIOCOUTQ  # Linux: bytes in the socket's send queue that the other side has not acknowledged


class TrafficCounter:
    """Counts the bytes of a client of nats-py.

    Headers and protocol are not counted exactly, so compare two looks only: bytes moved when either number grew.
    """

    def __init__(self) -> None:
        self._client: GuardedClient | None = None
        self._written = 0

    def watch(self, client: GuardedClient) -> None:
        """Count for this connection from now on."""
        self._client, self._written = client, 0

    def wrote(self, num_bytes: int) -> None:
        """Count payload bytes handed to the client."""
        self._written += num_bytes

    def now(self) -> tuple[int, int]:
        """(bytes that have left this machine, bytes that have come), of a message that is half received, too."""
        client = self._client
        if client is None:
            return 0, 0
        # the client has no public name for what is half received
        received = client.stats["in_bytes"] + len(client._ps.buf)
        return self._written - self._unsent(client), received

    def moved_since(self, before: tuple[int, int]) -> bool:
        """Whether any byte has left or come since that look."""
        sent, received = self.now()
        return sent > before[0] or received > before[1]

    def _unsent(self, client: GuardedClient) -> int:
        """Bytes on their way out: in the client, in the event loop's transport, and in the kernel where it tells."""
        writer = getattr(client._transport, "_io_writer", None)
        waiting: int = client._pending_data_size
        if writer is None or writer.transport.is_closing():
            return waiting
        waiting += writer.transport.get_write_buffer_size()
        sock = writer.get_extra_info("socket")
        if sys.platform == "linux" and sock is not None and sock.fileno() >= 0:
            waiting += struct.unpack("i", fcntl.ioctl(sock.fileno(), _SIOCOUTQ, bytes(4)))[0]
        return waiting
