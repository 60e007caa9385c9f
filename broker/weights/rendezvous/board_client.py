"""A server's end of the rendezvous: a store on the learner's, encrypted and authenticated by both
ends' keys.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Final

import msgspec
import zmq

from broker.errors import TransferFailed
from broker.weights.rendezvous.board_request import BoardRequest, BoardStore
from broker.weights.rendezvous.board_server import ERROR, NO

POLL_MS: Final = 100
MAX_REPLY_BYTES: Final = 65 << 20  # the learner's plan may be large


@dataclass(frozen=True)
class KeyPair:
    """A CURVE key pair in Z85. It is made for one epoch of the learner, and never stored."""

    public: str
    secret: bytes

    def __repr__(self) -> str:
        return f"KeyPair(public={self.public!r})"

    @classmethod
    def make(cls) -> KeyPair:
        public, secret = zmq.curve_keypair()
        return cls(public.decode(), secret)


@dataclass(frozen=True)
class RendezvousAddress:
    """Where the learner's rendezvous is, and the public key (Z85) that proves that it is the
    learner's.
    """

    host: str
    port: int
    key: str

    @property
    def where(self) -> str:
        """Host and port."""
        return f"{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"


class BoardClient(BoardStore):
    """A connection. Its methods may be called from any thread.

    Args:
        timeout_s: longest wait for the connection, and for a reply beyond what the request itself
            waits for.

    Raises:
        TransferFailed: if there is no answer; it may be that this server was not admitted.
    """

    def __init__(self, address: RendezvousAddress, keys: KeyPair, timeout_s: float) -> None:
        super().__init__(timeout_s)
        self.address = address
        self._keys = keys
        self.timeout_s = timeout_s
        self._lock = threading.Lock()
        self._serial = 0
        self.lost = ""
        self._socket = self.connect()
        # a dead learner's host closes at once
        self._monitor = self._socket.get_monitor_socket(zmq.Event.DISCONNECTED)
        try:
            self.request(BoardRequest("check"))
        except RuntimeError:
            self.close()
            raise TransferFailed(
                f"no answer from the learner's rendezvous {address.where} within {timeout_s:g} s; if it is on another "
                "host, set train.weights_interface to the learner's interface and open train.weights_port in firewalls"
            ) from None

    def connect(self) -> zmq.Socket[bytes]:
        """Return one more connection to the learner; the caller owns it."""
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        socket.curve_serverkey = self.address.key.encode()
        socket.curve_publickey = self._keys.public.encode()
        socket.curve_secretkey = self._keys.secret
        socket.linger = 0
        socket.ipv6 = ":" in self.address.host
        socket.maxmsgsize = MAX_REPLY_BYTES
        socket.heartbeat_ivl = 5000
        socket.heartbeat_timeout = 30_000
        socket.connect(f"tcp://{self.address.where}")
        return socket

    def request(self, request: BoardRequest) -> list[bytes] | None:
        """Perform an operation.

        Raises:
            RuntimeError: if it cannot be performed, or there is no reply; after that there is none
                to any request.
        """
        with self._lock:
            if self.lost:
                raise RuntimeError(self.lost)
            deadline = time.monotonic() + request.timeout_s + self.timeout_s
            request_id = self._send(request)
            while True:
                if self._socket.poll(POLL_MS):
                    received, status, *values = self._socket.recv_multipart()
                    if received == request_id:
                        break
                elif self.lost or self._monitor.poll(0) or time.monotonic() > deadline:
                    problem = (
                        "closed the connection"
                        if self._monitor.poll(0)
                        else f"did not answer within {self.timeout_s:g} s"
                    )
                    self.lost = self.lost or f"{self.address.where} {problem}"
                    self._end()
                    raise RuntimeError(self.lost)
        if status == ERROR:
            raise RuntimeError(b"".join(values).decode(errors="replace")[:500])
        return None if status == NO else values

    def post(self, request: BoardRequest) -> None:
        """Send a request without waiting for its reply, which costs a long link's round trip."""
        with self._lock:
            if not self.lost:
                self._send(request)

    def _send(self, request: BoardRequest) -> bytes:
        self._serial += 1
        request_id = self._serial.to_bytes(8)
        self._socket.send_multipart([request_id, msgspec.msgpack.encode(request)], zmq.NOBLOCK)
        return request_id

    def close(self) -> None:
        """Disconnect; a request in another thread fails."""
        self.lost = self.lost or "the connection was closed"
        if self._lock.acquire(timeout=3 * POLL_MS / 1000):
            self._end()
            self._lock.release()

    def _end(self) -> None:
        if not self._socket.closed:
            self._socket.disable_monitor()
            self._monitor.close()
            self._socket.close()
