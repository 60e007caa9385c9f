"""Generation requests over ZeroMQ: the client's DEALER to the server's ROUTER, one socket per server.

Delivery is at most once: if the connection breaks, messages are lost, and the client retries elsewhere. Each ZeroMQ
message is a ``bundle`` of (token, message) pairs; the client chooses the token, which is empty for an abort.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import Final

import zmq
from zmq.utils.monitor import parse_monitor_message

from broker.channel.bundle import MAX_BUNDLE_BYTES, unpack
from broker.channel.carriers import AbortHandler, Handler, RequestChannel
from broker.channel.client import RequestClient
from broker.channel.endpoint import Reply, RequestEndpoint
from broker.channel.zmq_socket import Frames, LoopSocket
from broker.errors import RequestFailed, WireError
from broker.jetstream.bus import Bus
from broker.server.private_server import require_loopback

LINGER_MS: Final = 1000  # how long close waits for replies to be sent
FAREWELL_S: Final = 0.1  # from the last reply to closing: with IMMEDIATE, unread replies are then lost
HEARTBEAT_MS: Final = 2000
SILENT_MS: Final = 10_000  # without a heartbeat, after which a peer counts as gone even if TCP has not noticed
LOST: Final = zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED  # no reply can arrive; nothing listens


def _socket(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    socket.setsockopt(zmq.SNDHWM, 0)  # a full ROUTER silently drops replies; slots limit the pending requests
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_BUNDLE_BYTES)
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENT_MS)
    socket.setsockopt(zmq.IPV6, 1)
    return socket


class ZmqServer:
    """Answers requests on a free port of a loopback address."""

    def __init__(self, bus: Bus, server_id: str, bind: str) -> None:
        require_loopback(bind)
        self.address = ""
        self._bus, self._server_id, self._bind = bus, server_id, bind
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket: LoopSocket | None = None
        self._desk: RequestEndpoint | None = None

    async def start(self, handle: Handler, abort: AbortHandler) -> None:
        """Bind a free port and start answering."""
        host = "127.0.0.1" if self._bind == "localhost" else f"[{self._bind}]" if ":" in self._bind else self._bind
        socket = _socket(self._context, zmq.ROUTER)
        socket.bind(f"tcp://{host}:*")
        self.address = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._desk = RequestEndpoint(self._bus, self._server_id, handle, abort)
        self._socket = LoopSocket(socket, self._receive)

    async def close(self) -> None:
        """Answer pending requests, then disconnect."""
        if self._socket is not None and self._desk is not None:
            await self._desk.close()
            await asyncio.sleep(FAREWELL_S)
            self._socket.close()
            self._socket = None
        await _terminate(self._context)

    def _receive(self, frames: Frames) -> None:
        socket, desk = self._socket, self._desk
        assert socket is not None
        assert desk is not None
        route, data = frames[0], frames[1] if len(frames) == 2 else b"".join(frames[1:])
        try:
            entries = unpack(data)
        except WireError as error:
            desk.refuse(str(error), data)
            return
        for token, message in entries:
            desk.receive(message, _answering(socket, route, token))


def _answering(socket: LoopSocket, route: bytes, token: str) -> Reply:
    async def reply(data: bytes) -> None:
        socket.post(route, token, data)

    return reply


@dataclass
class _Line:
    """The connection to one server."""

    socket: LoopSocket
    monitor: LoopSocket
    inner: zmq.Socket[bytes]


class ZmqClient:
    """Sends requests to servers by their addresses."""

    def __init__(self, bus: Bus) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, self._context.get(zmq.SOCKET_LIMIT))  # a line takes 3, the default is 1,023
        self._lines: dict[str, _Line] = {}
        self._asker = RequestClient(bus, self)
        self._closed = False
        self.generate, self.abort = self._asker.generate, self._asker.abort

    def post(self, address: str, token: str, data: bytes, asker: asyncio.Future[bytes] | None) -> bool:
        """See ``broker.channel.client.RequestCarrier``."""
        line = self._lines.get(address)
        if line is None:
            if not token:
                return True  # no request was ever sent there
            line = self._connect(address)
        line.socket.post(b"", token, data, asker)
        return True

    async def send(self, address: str, token: str, data: bytes) -> None:
        """See ``broker.channel.client.RequestCarrier``."""
        self.post(address, token, data, None)

    async def forget(self, address: str) -> None:
        """Fail the pending requests to a server and close its socket."""
        line = self._lines.pop(address, None)
        self._asker.fail_all("the server is gone", address)
        if line is not None:
            _hang_up(line)

    async def close(self) -> None:
        """Fail all pending requests and disconnect."""
        self._closed = True
        await self._asker.close()
        lines = list(self._lines.values())
        self._lines.clear()
        for line in lines:
            _hang_up(line)
        await _terminate(self._context)

    def _connect(self, address: str) -> _Line:
        if self._closed:
            raise RequestFailed(f"{address}: the client was closed")
        try:
            socket = _socket(self._context, zmq.DEALER)
        except zmq.ZMQError as error:
            raise RequestFailed(f"{address}: no connection can be opened: {error}") from None
        try:
            socket.setsockopt(zmq.IMMEDIATE, 1)  # do not queue messages for a server that is gone
            socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
            monitor = socket.get_monitor_socket(LOST)
        except zmq.ZMQError as error:
            socket.close(0)
            raise RequestFailed(f"{address}: no connection can be opened: {error}") from None
        try:
            socket.connect(address)
        except zmq.ZMQError as error:
            socket.disable_monitor()
            monitor.close(0)
            socket.close(0)
            raise RequestFailed(f"{address} is not a server address: {error}") from None
        line = LoopSocket(socket, lambda frames: self._receive(address, frames))
        watch = LoopSocket(monitor, lambda frames: self._lost(address, line, frames))
        self._lines[address] = _Line(line, watch, socket)
        return self._lines[address]

    def _receive(self, address: str, frames: Frames) -> None:
        data = frames[0] if len(frames) == 1 else b"".join(frames)
        try:
            entries = unpack(data)
        except WireError as error:
            self._asker.refuse(address, str(error), data)
            return
        for token, message in entries:
            self._asker.answered(token, message)

    def _lost(self, address: str, socket: LoopSocket, frames: Frames) -> None:
        refused = parse_monitor_message(frames)["event"] == zmq.EVENT_CONNECT_RETRIED
        socket.read_all()  # a server replies before it closes
        self._asker.fail_all("nothing listens there" if refused else "the connection broke", address)


def _hang_up(line: _Line) -> None:
    line.inner.disable_monitor()  # before it is closed
    line.monitor.close()
    line.socket.close()


async def _terminate(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    """Wait in a thread until pending messages are sent or the linger time is over."""
    with contextlib.suppress(zmq.ZMQError):  # already terminated
        await asyncio.to_thread(context.term)


CHANNEL: Final = RequestChannel(ZmqServer, ZmqClient)
