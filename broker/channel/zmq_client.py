"""The client's end of the ZeroMQ channel: one connection to each server, local or encrypted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import zmq
from zmq.utils.monitor import parse_monitor_message

from broker.channel.bundle import unpack_bundle
from broker.channel.client import RequestClient
from broker.channel.zmq_address import BadAddress, ServerAddress, display_address
from broker.channel.zmq_options import MAX_UNREAD, open_socket, terminate_context
from broker.channel.zmq_socket import Frames, LoopSocket
from broker.errors import RequestFailed, WireError
from broker.jetstream.bus import Bus

# ZeroMQ does not retry
REFUSED: Final = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
# no reply can arrive; nothing listens
NO_CONNECTION: Final = zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED
NOT_ADMITTED: Final = "it does not admit this process: no presence of it is heard there"
WRONG_SERVER: Final = "what listens there is not this server"
# after connecting: a server waits 3 s for this process's presence
KNOCK_S: Final = (0.1, 0.3, 0.7, 1.5)


@dataclass
class _Line:
    """The connection to one server."""

    socket: LoopSocket
    monitor: LoopSocket
    inner: zmq.Socket[bytes]


class ZmqClient:
    """Sends requests to servers by their addresses.

    Attributes:
        key: public CURVE key, which this process's presence must announce.
        announce: called while a server waits for that presence.
    """

    def __init__(self, bus: Bus) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        # a line takes 3, the default is 1,023
        self._context.set(zmq.MAX_SOCKETS, self._context.get(zmq.SOCKET_LIMIT))
        public, self._secret = zmq.curve_keypair()
        self.key = public.decode()
        self.announce: Callable[[], None] = lambda: None
        self._lines: dict[str, _Line] = {}
        self._asker = RequestClient(bus, self, display_address)
        self._closed = False
        self.generate = self._asker.generate
        self.abort = self._asker.abort

    def post(
        self, address: str, token: str, data: bytes, asker: asyncio.Future[bytes] | None
    ) -> bool:
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
        self._drop(address, "the server is gone")

    async def close(self) -> None:
        """Fail all pending requests and disconnect."""
        self._closed = True
        await self._asker.close()
        lines = list(self._lines.values())
        self._lines.clear()
        for line in lines:
            _hang_up(line)
        await terminate_context(self._context)

    def _drop(self, address: str, reason: str) -> None:
        line = self._lines.pop(address, None)
        self._asker.fail_all(reason, address)
        if line is not None:
            _hang_up(line)

    def _connect(self, address: str) -> _Line:
        if self._closed:
            raise RequestFailed(f"{display_address(address)}: the client was closed")
        try:
            endpoint, server_key = ServerAddress.parse(address).endpoint()
        except BadAddress as error:
            raise RequestFailed(str(error)) from None
        socket = None
        try:
            socket = open_socket(self._context, zmq.DEALER)
            socket.setsockopt(zmq.SNDHWM, MAX_UNREAD)
            socket.setsockopt(zmq.IMMEDIATE, 1)  # do not queue messages for a server that is gone
            socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
            if server_key:
                socket.curve_serverkey = server_key.encode()
                socket.curve_publickey = self.key.encode()
                socket.curve_secretkey = self._secret
            monitor = socket.get_monitor_socket(NO_CONNECTION | REFUSED)
        except zmq.ZMQError as error:
            if socket is not None:
                socket.close(0)
            raise RequestFailed(
                f"{display_address(address)}: no connection can be opened: {error}"
            ) from None
        try:
            socket.connect(endpoint)
        except zmq.ZMQError as error:
            socket.disable_monitor()
            monitor.close(0)
            socket.close(0)
            raise RequestFailed(
                f"{display_address(address)} is not a server address: {error}"
            ) from None
        line = LoopSocket(socket, lambda frames: self._receive(address, frames))
        watch = LoopSocket(monitor, lambda frames: self._lost(address, line, frames))
        self._lines[address] = _Line(line, watch, socket)
        if server_key:
            for delay_s in KNOCK_S:
                asyncio.get_running_loop().call_later(delay_s, self._knock)
        return self._lines[address]

    def _knock(self) -> None:
        if not self._closed:
            self.announce()

    def _receive(self, address: str, frames: Frames) -> None:
        if len(frames) != 1:
            self._asker.refuse(address, f"{len(frames)} parts where one is allowed", frames[0])
            return
        try:
            entries = unpack_bundle(frames[0])
        except WireError as error:
            self._asker.refuse(address, str(error), frames[0])
            return
        for token, message in entries:
            self._asker.answered(token, message, address)

    def _lost(self, address: str, socket: LoopSocket, frames: Frames) -> None:
        event = parse_monitor_message(frames)["event"]
        socket.read_all()  # a server replies before it closes
        if event & REFUSED:
            reason = NOT_ADMITTED if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH else WRONG_SERVER
            asyncio.get_running_loop().call_soon(self._drop_line, address, socket, reason)
            self._asker.fail_all(reason, address)
            return
        is_unreachable = event == zmq.EVENT_CONNECT_RETRIED
        self._asker.fail_all(
            "nothing listens there" if is_unreachable else "the connection broke", address
        )

    def _drop_line(self, address: str, socket: LoopSocket, reason: str) -> None:
        """Drop a connection that ZeroMQ does not open again, so that the next request opens a new
        one.
        """
        line = self._lines.get(address)
        if line is not None and line.socket is socket:
            self._drop(address, reason)


def _hang_up(line: _Line) -> None:
    line.inner.disable_monitor()  # before it is closed
    line.monitor.close()
    line.socket.close()
