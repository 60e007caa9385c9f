"""The learner's end of the rendezvous: one ZeroMQ port, open only to servers that were admitted by
their key.

A key pair of this object's own encrypts and authenticates it. ZeroMQ asks for every client's key
(ZAP) when it connects; each later request is checked again, so that an expelled server gets nothing
more on an open connection.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import Any, Final, Protocol

import msgspec
import zmq
from zmq.utils import z85

from broker.weights.rendezvous.board import Board, BoardFull
from broker.weights.rendezvous.board_request import BoardRequest, BoardStore
from broker.weights.rendezvous.socket_thread import SocketThread

ZAP: Final = "inproc://zeromq.zap.01"
MAX_REQUEST_BYTES: Final = 2 << 20
MAX_UNSENT: Final = 64  # messages to one server that does not read them; further ones are dropped
READ_AT_ONCE: Final = 1000  # messages
REFUSALS_EVERY_S: Final = 10.0
YES = b"+"
NO = b"-"
ERROR = b"!"

log = logging.getLogger(__name__)


class Shelf(Protocol):
    """Buckets that servers fetch, see ``broker.weights.curve_group``."""

    def fetch(self, server: str, token: Hashable, request: BoardRequest) -> None:
        """Note a request for a part of a bucket."""
        ...

    def parts(self) -> list[tuple[Hashable, bytes | None]]:
        """Return the requested parts that are available, None for those that never will be."""
        ...


class BoardServer:
    """The rendezvous of one learner's epoch, or of the nodes of a learner.

    Args:
        host: address of the interface to listen on.
        port: 0 takes any free one.
        secret: secret CURVE key in Z85; made up by default.
        name: of what meets here, for the log.

    Attributes:
        port: that it listens on.
        key: public key, in Z85.

    Raises:
        OSError: if the address or port is not available.
    """

    def __init__(
        self, host: str, port: int = 0, *, secret: bytes | None = None, name: str = "weights"
    ) -> None:
        self._host = host
        self._name = name
        self._board = Board()
        self.changed = threading.Condition()
        self._admitted: dict[str, str] = {}  # key in Z85: server
        self._shelves: dict[str, Shelf] = {}
        self._refused_until = 0.0  # no further line about it in the log
        self._secret = zmq.curve_keypair()[1] if secret is None else secret
        self.key = zmq.curve_public(self._secret).decode()
        self._context = zmq.Context(io_threads=2)
        self._zap = self._context.socket(zmq.REP)
        self._zap.bind(ZAP)
        self._router = listening(self._context, self._secret)
        try:
            self.port = self._bind(self._router, port)
        except OSError:
            self._context.destroy(linger=0)
            raise
        self._failed = self._router.get_monitor_socket(zmq.Event.HANDSHAKE_FAILED_PROTOCOL)
        sockets = {
            self._zap: self._on_client,
            self._router: self._on_request,
            self._failed: self._on_failed,
        }
        self._thread = SocketThread(f"{name}-rendezvous", sockets, self._turn, self._context.term)

    def _bind(self, socket: zmq.Socket[bytes], port: int = 0) -> int:
        host = self._host
        try:
            socket.ipv6 = ":" in host
            socket.bind(f"tcp://{f'[{host}]' if ':' in host else host}:{port or '*'}")
        except zmq.ZMQError as error:
            raise OSError(error.errno, error.strerror) from None
        return int(bytes(socket.getsockopt(zmq.LAST_ENDPOINT)).rpartition(b":")[2].rstrip(b"\0"))

    def open_pair(
        self, prepare: Callable[[zmq.Socket[bytes]], None]
    ) -> tuple[zmq.Socket[bytes], int]:
        """Return a socket that one admitted client can connect to, and its port; close it before
        this object.

        Args:
            prepare: sets options before the socket listens.

        Raises:
            OSError: if no port is free.
        """
        pair = listening(self._context, self._secret, zmq.PAIR)
        prepare(pair)
        return pair, self._bind(pair)

    def store(self, timeout_s: float) -> LearnerStore:
        """Return the learner's own store; its methods may be called from any thread."""
        return LearnerStore(self, timeout_s)

    # ---------------------------------------------------------------------------------------------
    # admission

    def admit(self, server: str, key: str) -> bool:
        """Let a server in by its public key (Z85), in exchange for the key that it had; False if it
        is another's.
        """
        with self.changed:
            if self._admitted.get(key, server) != server:
                return False
            self._expel(server)
            self._admitted[key] = server
            return True

    def expel(self, server: str) -> None:
        """Refuse a server's further requests, on open connections too."""
        with self.changed:
            self._expel(server)

    def admitted(self) -> set[str]:
        """Return the admitted servers."""
        with self.changed:
            return set(self._admitted.values())

    def _expel(self, server: str) -> None:
        for key in [key for key, owner in self._admitted.items() if owner == server]:
            del self._admitted[key]

    def _on_client(self) -> None:
        """Answer ZeroMQ, which asks whether a client may connect (RFC 27)."""
        version, request_id, _domain, address, _identity, mechanism, *credentials = (
            self._zap.recv_multipart()
        )
        key = z85.encode(credentials[0]).decode() if mechanism == b"CURVE" and credentials else ""
        with self.changed:
            is_known = key in self._admitted
        if not is_known:
            self._say_refused(
                f"{address.decode()} was refused at the rendezvous: its key was not admitted"
            )
        status, text = (b"200", b"OK") if is_known else (b"400", b"not admitted")
        self._zap.send_multipart(
            [version, request_id, status, text, key.encode() if is_known else b"", b""]
        )

    def _on_failed(self) -> None:
        """Read that a client expected another key here, or does not speak ZeroMQ; who it was is not
        known.
        """
        self._failed.recv_multipart()
        self._say_refused(
            "somebody was refused at the rendezvous, who expects another key here or is another program"
        )

    def _say_refused(self, text: str) -> None:
        if self._refused_until < time.monotonic():
            self._refused_until = time.monotonic() + REFUSALS_EVERY_S
            log.warning("%s: %s", self._name, text)

    # ----------------------------------------------------------------------------------------------
    # requests

    def share(self, name: str, shelf: Shelf) -> None:
        """Let servers fetch the buckets of a shelf."""
        with self.changed:
            self._shelves[name] = shelf

    def withdraw(self, name: str) -> None:
        """End that."""
        with self.changed:
            self._shelves.pop(name, None)

    def poke(self) -> None:
        """Have the socket's thread answer what has become available."""
        self._thread.poke()

    def perform(self, request: BoardRequest) -> list[bytes] | None:
        """Perform an operation that does not wait; call it with ``changed`` held.

        Raises:
            ValueError: if it is not possible.
        """
        board = self._board
        op = request.op
        if op == "count":
            return [str(len(board)).encode()]
        if op == "check":
            return [] if board.has(request.keys) else None
        if len(request.keys) != 1:
            raise ValueError(f"{op} takes one key, not {len(request.keys)}")
        key = request.keys[0]
        if op == "peek":
            value = board.get(key)
            return None if value is None else [value]
        try:
            if op == "set":
                board.set(key, request.value)
            elif op == "append":
                board.append(key, request.value)
            elif op == "add":
                return [str(board.add(key, request.number)).encode()]
            elif op == "compare_set":
                return [board.compare_set(key, request.expected, request.value)]
            elif op == "delete":
                return [] if board.delete(key) else None
            else:
                raise ValueError(f"{op} is not possible here")
            return []
        finally:
            self.changed.notify_all()

    def keep(self, key: str, value: bytes) -> None:
        """Store a value that nobody can change or delete any more."""
        with self.changed:
            self._board.set(key, value)
            self._board.seal(key)

    def has(self, keys: list[str]) -> list[bytes] | None:
        """Return the values of keys, None if one is missing; call it with ``changed`` held."""
        return [self._board.get(key) or b"" for key in keys] if self._board.has(keys) else None

    def _on_request(self) -> None:
        for _ in range(READ_AT_ONCE):
            try:
                frames = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            key = _user(frames[0])
            with self.changed:
                server = self._admitted.get(key)
                if server is None or len(frames) != 3:
                    continue  # expelled: no word about why
                self._handle(server, (frames[0].bytes, frames[1].bytes), frames[2].buffer)

    def _handle(self, server: str, token: tuple[bytes, bytes], body: Any) -> None:
        try:
            request = _decoder.decode(body)
            if request.op == "wait":
                self._board.wait(
                    (*token, server), request.keys, time.monotonic() + request.timeout_s
                )
            elif request.op == "fetch":
                shelf = self._shelves.get(request.keys[0]) if request.keys else None
                if shelf is None:
                    raise ValueError("no such transfer")
                shelf.fetch(server, (*token, server), request)
            else:
                self._reply(token, self.perform(request))
        except (ValueError, msgspec.DecodeError) as error:
            self._send([*token, ERROR, str(error).encode()])

    def _turn(self) -> float | None:
        with self.changed:
            for wait in self._board.ended(time.monotonic()):
                self._reply_waiting(wait.token, wait.values)
            for shelf in self._shelves.values():
                for token, part in shelf.parts():
                    self._reply_waiting(token, None if part is None else [part])
            deadline = self._board.next_deadline()
        return None if deadline is None else max(0.0, deadline - time.monotonic())

    def _reply_waiting(self, token: Any, values: list[bytes] | None) -> None:
        route, request_id, server = token
        if server in self._admitted.values():
            self._reply((route, request_id), values)

    def _reply(self, token: tuple[bytes, bytes], values: list[bytes] | None) -> None:
        self._send([*token, NO] if values is None else [*token, YES, *values])

    def _send(self, frames: list[bytes]) -> None:
        with suppress(zmq.Again):
            self._router.send_multipart(frames, zmq.NOBLOCK, copy=False)

    def close(self) -> None:
        """Stop listening."""
        self._thread.close()


class LearnerStore(BoardStore):
    """The learner's own view of its rendezvous, without a socket."""

    def __init__(self, server: BoardServer, timeout_s: float) -> None:
        super().__init__(timeout_s)
        self.server = server

    def request(self, request: BoardRequest) -> list[bytes] | None:
        """Perform an operation.

        Raises:
            RuntimeError: if it cannot be performed.
        """
        server = self.server
        try:
            with server.changed:
                if request.op == "wait":
                    keys = list(request.keys)
                    return (
                        server.changed.wait_for(lambda: server.has(keys), request.timeout_s) or None
                    )
                values = server.perform(request)
        except (BoardFull, ValueError) as error:
            raise RuntimeError(str(error)) from None
        if request.op not in ("peek", "check", "count"):
            server.poke()
        return values


_decoder: Final = msgspec.msgpack.Decoder(BoardRequest)


def listening(
    context: zmq.Context[zmq.Socket[bytes]], secret: bytes, kind: int = zmq.ROUTER
) -> zmq.Socket[bytes]:
    """Return a socket that takes encrypted requests, with limits; it is not bound yet."""
    router = context.socket(kind)
    router.curve_server = True
    router.curve_secretkey = secret
    router.zap_domain = b"weights"
    router.linger = 0
    router.handshake_ivl = 5000
    router.maxmsgsize = MAX_REQUEST_BYTES
    router.sndhwm = MAX_UNSENT
    router.rcvhwm = READ_AT_ONCE
    router.heartbeat_ivl = 5000
    router.heartbeat_timeout = 30_000
    router.tcp_keepalive = 1
    return router


def _user(frame: zmq.Frame) -> str:
    try:
        return str(frame.get("User-Id"))
    except zmq.ZMQError:
        return ""
