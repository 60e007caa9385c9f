"""Limits the connections of a listening socket, and the memory that each can make ZeroMQ hold.

ZeroMQ's own limits count complete messages: the parts of a message that never ends, and the replies
that a peer never reads, are not bounded. The kernel counts the bytes of every TCP connection. What
it received and no complete message accounts for is what ZeroMQ holds for that peer, and likewise
what was posted and not acknowledged. A connection with too much of either is shut down; ZeroMQ then
drops it with its buffers.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
from dataclasses import dataclass, field
from typing import Final

from broker.contract.sizes import MAX_PAYLOAD_BYTES

log = logging.getLogger(__name__)

MAX_CONNECTIONS: Final = 4096
# connections without a message: of strangers, or of hubs that have just connected
MAX_SILENT: Final = 256
MAX_SILENT_BYTES: Final = 64 << 20  # received from all of these
MAX_OF_KEY: Final = 4  # a hub has one
MAX_PENDING_BYTES: Final = 4 * MAX_PAYLOAD_BYTES  # received from one hub, in no complete message
MAX_UNREAD_BYTES: Final = 8 * MAX_PAYLOAD_BYTES  # posted to one hub, not acknowledged by its kernel
FRAME_BYTES: Final = 64  # around a message on the wire, at most
SCAN_S: Final = 0.1
SCANS_PER_S: Final = 4000  # connections; more are scanned less often
TCP_INFO: Final = getattr(socket, "TCP_INFO", None)
COUNTERS: Final = struct.Struct("=QQ")  # tcpi_bytes_acked, tcpi_bytes_received
COUNTERS_AT: Final = 120  # offset in struct tcp_info


@dataclass(eq=False)
class Connection:
    """One connection of the listening socket.

    Attributes:
        socket: a duplicate of ZeroMQ's descriptor, which stays valid when ZeroMQ closes its own.
        key: of the hub, empty until its first message.
        pending: bytes received and not yet in a complete message, at the last scan.
        unread: bytes posted and not yet acknowledged, at the last scan.
        arrived: bytes of complete messages since the last scan.
        posted: bytes posted since the last scan.
    """

    socket: socket.socket
    key: str = ""
    pending: int = 0
    unread: int = 0
    arrived: int = 0
    posted: int = 0
    acked_total: int = 0
    received_total: int = 0
    is_shut: bool = False


@dataclass
class ConnectionLimits:
    """The connections of one listening socket.

    Args:
        port: of the socket.

    Attributes:
        excessive: keys of hubs that exceeded a limit since the last call of ``take_excessive``.
    """

    port: int
    max_connections: int = MAX_CONNECTIONS
    excessive: set[str] = field(default_factory=set)
    _by_fd: dict[int, Connection] = field(default_factory=dict)
    _silent: dict[int, Connection] = field(default_factory=dict)  # in order of their arrival
    _of_key: dict[str, set[Connection]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._by_fd)

    @property
    def scan_s(self) -> float:
        """Seconds until the next scan, so that scans take about two percent of a core at most."""
        return max(SCAN_S, len(self._by_fd) / SCANS_PER_S)

    def accepted(self, fd: int) -> None:
        """Note a new connection; shut it, or the oldest one that has sent nothing, if there are too
        many.
        """
        self.closed(fd)
        try:
            duplicate = socket.socket(fileno=os.dup(fd))
        except OSError:
            return  # closed already
        try:
            is_ours = duplicate.family != socket.AF_UNIX and duplicate.getsockname()[1] == self.port
        except OSError:
            is_ours = False
        if not is_ours:
            duplicate.close()  # the descriptor has been used again for something else
            return
        connection = self._by_fd[fd] = self._silent[fd] = Connection(duplicate)
        if len(self._by_fd) > self.max_connections:
            self._shut(connection, f"there are {self.max_connections} connections")
        waiting = [silent for silent in self._silent.values() if not silent.is_shut]
        for oldest in waiting[: max(0, len(waiting) - MAX_SILENT)]:
            self._shut(oldest, "too many connections have sent nothing")

    def closed(self, fd: int) -> None:
        """Forget a connection that ZeroMQ has closed."""
        connection = self._by_fd.pop(fd, None)
        self._silent.pop(fd, None)
        if connection is not None:
            connection.socket.close()
            self._leave_key(connection)

    def received(self, fd: int, key: str, size: int) -> Connection | None:
        """Note a complete message of a hub; return its connection, None if that is closed."""
        connection = self._by_fd.get(fd)
        if connection is None:
            return None
        connection.arrived += size + FRAME_BYTES
        if not connection.key:
            self._silent.pop(fd, None)
            connection.key = key
            of_key = self._of_key.setdefault(key, set())
            of_key.add(connection)
            if len(of_key) > MAX_OF_KEY:
                self._shut(connection, f"its hub has {MAX_OF_KEY} connections")
        return connection

    def drop(self, key: str) -> None:
        """Shut all connections of a hub."""
        for connection in list(self._of_key.get(key, ())):
            self._shut(connection, "its hub is no longer admitted")

    def scan(self) -> None:
        """Shut the connections that make ZeroMQ hold too much; call it when all complete messages
        have been read.
        """
        for connection in self._by_fd.values():
            _update_counters(connection)
        silent = [connection for connection in self._silent.values() if not connection.is_shut]
        total = sum(connection.pending for connection in silent)
        for connection in sorted(silent, key=lambda connection: -connection.pending):
            if total <= MAX_SILENT_BYTES:
                break
            total -= connection.pending
            self._shut(connection, "connections without a complete message sent too much")
        for key, connections in self._of_key.items():
            pending = sum(connection.pending for connection in connections)
            unread = sum(connection.unread for connection in connections)
            if pending > MAX_PENDING_BYTES:
                problem = f"its hub sent {pending >> 20} MiB without a complete message"
            elif unread > MAX_UNREAD_BYTES:
                problem = f"its hub does not read its replies, {unread >> 20} MiB"
            else:
                continue
            self.excessive.add(key)
            for connection in connections:
                self._shut(connection, problem)

    def take_excessive(self) -> set[str]:
        """Return ``excessive`` and empty it."""
        keys = self.excessive
        self.excessive = set()
        return keys

    def close(self) -> None:
        """Forget all connections."""
        for fd in list(self._by_fd):
            self.closed(fd)

    def _leave_key(self, connection: Connection) -> None:
        of_key = self._of_key.get(connection.key, set())
        of_key.discard(connection)
        if not of_key:
            self._of_key.pop(connection.key, None)

    def _shut(self, connection: Connection, reason: str) -> None:
        if connection.is_shut:
            return
        connection.is_shut = True
        try:
            peer = connection.socket.getpeername()[0]
            connection.socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # the peer has closed it
        log.info("closing a connection of %s: %s", peer, reason)


def _update_counters(connection: Connection) -> None:
    """Bring ``pending`` and ``unread`` up to date; nothing below zero is kept, so that no peer can
    save up.
    """
    if TCP_INFO is None:
        return
    try:
        info = connection.socket.getsockopt(
            socket.IPPROTO_TCP, TCP_INFO, COUNTERS_AT + COUNTERS.size
        )
    except OSError:
        return
    if len(info) < COUNTERS_AT + COUNTERS.size:
        return  # a kernel before 4.1
    acked, received = COUNTERS.unpack_from(info, COUNTERS_AT)
    connection.pending = max(
        0, connection.pending + received - connection.received_total - connection.arrived
    )
    connection.unread = max(
        0, connection.unread + connection.posted - (acked - connection.acked_total)
    )
    connection.acked_total = acked
    connection.received_total = received
    connection.arrived = connection.posted = 0
