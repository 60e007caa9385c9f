"""One connection between rank 0 and a rank of any node: ZeroMQ PAIR sockets with CURVE and
heartbeats.

ZeroMQ's own threads send and answer heartbeats, so a rank that computes or loads for minutes is not
taken for dead, and a host that vanishes without a word is.
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
OTHERS: Final = "others"
HEARTBEAT_MS: Final = 2000
# without an answer to a heartbeat, after which the other end counts as gone
SILENT_MS: Final = 15_000
LINGER_MS: Final = 3000  # for the last command
POLL_MS: Final = 200
TURN_MS: Final = 20
HAND_OVER_S: Final = 0.0002
MAX_UNREAD: Final = 64  # frames, which may have some MiB
MAX_FRAME_BYTES: Final = 1 << 30


class EncryptedFrames:
    """Frames over a PAIR socket, see ``learner.backends.ranks.link.Frames``; one thread takes, any
    may put.

    ZeroMQ's sockets are for one thread at a time, so both hold a lock, the one that takes only for
    ``TURN_MS``.

    Attributes:
        lost: whether the other end is gone.
    """

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self.lost = threading.Event()
        self._turn = threading.Lock()

    @classmethod
    def connect(cls, host: str, port: int, key: NodeKey) -> EncryptedFrames:
        """Connect to rank 0."""
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
        socket.curve_serverkey = key.curve_public(RANK_0).encode()
        socket.curve_publickey, socket.curve_secretkey = (
            key.curve_public(OTHERS).encode(),
            key.curve_secret(OTHERS),
        )
        socket.reconnect_ivl = -1  # a connection that was lost has lost frames
        prepare(socket)
        frames = cls(socket)
        socket.ipv6 = ":" in host
        socket.connect(f"tcp://{f'[{host}]' if ':' in host else host}:{port}")
        return frames

    def monitor(self) -> zmq.Socket[bytes]:
        """Return the socket that tells when the connection ends; for a ``LinkWatch``."""
        monitor: zmq.Socket[bytes] = self._socket.get_monitor_socket(zmq.Event.DISCONNECTED)
        return monitor

    def first(self) -> tuple[bytes, int] | None:
        """Return the first frame, if it is there, and the descriptor of the connection that it came
        by.
        """
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
            was_lost = self.lost.is_set()
            with self._turn:
                if self._socket.poll(0 if was_lost else TURN_MS):
                    return self._socket.recv()
            if was_lost:
                raise LinkClosedError("the other end has closed")
            time.sleep(HAND_OVER_S)  # a lock is not fair

    def closes(self, seconds: float) -> bool:
        return self.lost.wait(seconds)

    def close(self) -> None:
        if not self._socket.closed:
            self._socket.disable_monitor()
            self._socket.close(LINGER_MS)


def prepare(socket: zmq.Socket[bytes]) -> None:
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
            descriptor: of the connection; others that fail at the same port, such as strangers',
                are none of it.
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
        is_disconnect = event["event"] == zmq.Event.DISCONNECTED and descriptor in (
            None,
            event["value"],
        )
        if not is_disconnect and event["event"] != zmq.Event.MONITOR_STOPPED:
            return
        with self._lock:
            self._watched.pop(monitor)
        monitor.close(0)
        if is_disconnect:
            frames.lost.set()
            self.on_lost(frames)
