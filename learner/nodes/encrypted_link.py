"""A connection between rank 0 and a rank of any node: ZeroMQ PAIR sockets, CURVE, heartbeats.

ZeroMQ's own threads send and answer heartbeats. So a rank that computes for minutes is not taken
for dead, but a host that vanishes is.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Final

import zmq
from zmq.utils.monitor import parse_monitor_message

from learner.backends.ranks.link import LinkClosedError
from learner.nodes.key import NodeKey

RANK_0: Final = "rank-0"
OTHER_RANKS: Final = "others"
HEARTBEAT_MS: Final = 2000
# Without an answer to a heartbeat for this long, the other end counts as gone.
SILENT_MS: Final = 15_000
# For the last command, which ends the other end.
LINGER_MS: Final = 3000
# A day, so never: a connection that was lost has lost frames. With -1 ZeroMQ would drop the frames
# that came before the end and are not taken yet.
RECONNECT_MS: Final = 86_400_000
POLL_MS: Final = 200
# How long the thread that takes holds the socket, and another one that puts may wait.
TURN_MS: Final = 20
# Between two turns the lock is free for this long: a lock is not fair.
HAND_OVER_S: Final = 0.0002
# Frames, which may have some MiB each.
MAX_UNREAD: Final = 64
MAX_FRAME_BYTES: Final = 1 << 30


class EncryptedFrames:
    """Frames over a PAIR socket, see ``Frames``; one thread takes, any may put.

    A ZeroMQ socket is for one thread at a time, so both hold a lock; the thread that takes holds it
    for ``TURN_MS`` at most.

    Attributes:
        lost: whether the other end is gone.
    """

    def __init__(self, socket: zmq.Socket[bytes], monitor: zmq.Socket[bytes] | None = None) -> None:
        self._socket = socket
        self._monitor = monitor
        self.lost = threading.Event()
        self._turn = threading.Lock()

    @classmethod
    def connect(cls, host: str, port: int, key: NodeKey) -> EncryptedFrames:
        """Connect to rank 0."""
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
        socket.curve_serverkey = key.curve_public(RANK_0).encode()
        socket.curve_publickey = key.curve_public(OTHER_RANKS).encode()
        socket.curve_secretkey = key.curve_secret(OTHER_RANKS)
        socket.reconnect_ivl = RECONNECT_MS
        prepare_socket(socket)
        # From before it connects, so that no end is missed; it is closed if it cannot connect.
        frames = cls(socket, socket.get_monitor_socket(zmq.Event.DISCONNECTED | zmq.Event.CLOSED))
        socket.ipv6 = ":" in host
        socket.connect(f"tcp://{f'[{host}]' if ':' in host else host}:{port}")
        return frames

    def monitor(self) -> zmq.Socket[bytes]:
        """Return the socket that reports the connection's end, for one ``LinkWatch``, which closes
        it.
        """
        monitor = self._monitor
        if monitor is None:
            monitor = self._socket.get_monitor_socket(zmq.Event.DISCONNECTED)
        self._monitor = None
        return monitor

    def end_monitor(self) -> None:
        """Report nothing more; ZeroMQ's thread waits for a reader of each report."""
        with self._turn:
            if not self._socket.closed:
                self._socket.disable_monitor()

    def first(self) -> tuple[bytes, int] | None:
        """Return the first frame and the descriptor of its connection; None if it is not there."""
        if not self._socket.poll(0):
            return None
        frame = self._socket.recv(copy=False)
        return bytes(frame.buffer), int(frame.get(zmq.SRCFD))

    def put(self, frame: bytes) -> None:
        while not self.lost.is_set():
            with self._turn:
                if self._socket.poll(TURN_MS, zmq.POLLOUT):
                    self._socket.send(frame, zmq.NOBLOCK)
                    return
            time.sleep(HAND_OVER_S)
        raise LinkClosedError("the other end has closed")

    def take(self) -> bytes:
        while True:
            # Read before the poll: frames that came before the end must still be taken.
            was_lost = self.lost.is_set()
            with self._turn:
                if self._socket.poll(0 if was_lost else TURN_MS):
                    return self._socket.recv()
            if was_lost:
                raise LinkClosedError("the other end has closed")
            time.sleep(HAND_OVER_S)

    def closes(self, seconds: float) -> bool:
        return self.lost.wait(seconds)

    def close(self) -> None:
        self.end_monitor()
        if self._monitor is not None:
            self._monitor.close(0)
        # Nobody gets what a lost connection has not sent.
        self._socket.close(0 if self.lost.is_set() else LINGER_MS)


def prepare_socket(socket: zmq.Socket[bytes]) -> None:
    """Set heartbeats and limits of a socket that is not connected yet."""
    socket.heartbeat_ivl = HEARTBEAT_MS
    socket.heartbeat_timeout = SILENT_MS
    socket.heartbeat_ttl = SILENT_MS
    socket.sndhwm = socket.rcvhwm = MAX_UNREAD
    socket.maxmsgsize = MAX_FRAME_BYTES
    socket.linger = LINGER_MS


class LinkWatch:
    """A thread that notices ends of connections while others compute.

    Attributes:
        on_lost: called in the thread with the frames whose connection has ended.
    """

    def __init__(self, on_lost: Callable[[EncryptedFrames], None]) -> None:
        self.on_lost = on_lost
        # ``add`` is called while the thread reads.
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._watched: dict[Any, tuple[EncryptedFrames, int | None]] = {}
        self._thread = threading.Thread(target=self._run, name="links", daemon=True)
        self._thread.start()

    def add(
        self, frames: EncryptedFrames, monitor: zmq.Socket[bytes], descriptor: int | None = None
    ) -> None:
        """Watch a connection.

        Args:
            descriptor: of the connection; the ends of others at the same port, such as
                strangers', are ignored.
        """
        with self._lock:
            self._watched[monitor] = frames, descriptor

    def close(self) -> None:
        """Stop watching."""
        self._closing.set()
        self._thread.join(5.0)

    def _run(self) -> None:
        while not self._closing.is_set():
            with self._lock:
                watched = dict(self._watched)
            if not watched:
                time.sleep(POLL_MS / 1000)
                continue
            poller = zmq.Poller()
            for monitor in watched:
                poller.register(monitor, zmq.POLLIN)
            for monitor, _ in poller.poll(POLL_MS):
                self._read(monitor, *watched[monitor])
        for monitor in self._watched:
            monitor.close(0)

    def _read(
        self, monitor: zmq.Socket[bytes], frames: EncryptedFrames, descriptor: int | None
    ) -> None:
        event = parse_monitor_message(monitor.recv_multipart())
        ends = (zmq.Event.DISCONNECTED, zmq.Event.CLOSED)
        is_disconnect = event["event"] in ends and descriptor in (None, event["value"])
        if not is_disconnect and event["event"] != zmq.Event.MONITOR_STOPPED:
            return
        with self._lock:
            self._watched.pop(monitor)
        frames.end_monitor()
        monitor.close(0)
        if is_disconnect:
            frames.lost.set()
            self.on_lost(frames)
