"""Generation requests over ZeroMQ: the asker's DEALER to the server's ROUTER, one socket per server address.

Delivery: at most once. A message is lost when the connection breaks; the asker sees the break and asks elsewhere.
Frames: [token, message] from the asker, [token, message] back; a token is chosen by the asker and empty for an abort.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass
from typing import Any, Final

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from broker import wire
from broker.channel import AbortHandler, Handler
from broker.channel_asker import Asker
from broker.channel_desk import Desk
from broker.errors import RequestFailed
from broker.jetstream import Bus
from broker.server import require_loopback

log = logging.getLogger(__name__)

LINGER_MS: Final = 1000  # how long close waits for answers to leave
HEARTBEAT_MS: Final = 2000
SILENT_MS: Final = 10_000  # a peer that answers no heartbeat for this long is gone, even if TCP has not noticed
READ_TURNS: Final = 100_000  # of the event loop; bounds the reading when the server is already back
QUIET_TURNS: Final = 10  # after the socket is empty, until the reading task has passed on the last answer
LOST: Final = zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED  # an answer can no longer come; nobody listens


def _socket(context: zmq.asyncio.Context, kind: int) -> zmq.asyncio.Socket:
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    socket.setsockopt(zmq.SNDHWM, 0)  # a full ROUTER drops answers silently; slots bound what is outstanding
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, wire.MAX_PAYLOAD_BYTES)
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENT_MS)
    socket.setsockopt(zmq.IPV6, 1)
    return socket


class ZmqServer:
    """Answers on a free port of a loopback address."""

    def __init__(self, bus: Bus, server_id: str, bind: str) -> None:
        require_loopback(bind)
        self.address = ""
        self._bus, self._server_id, self._bind = bus, server_id, bind
        self._context = zmq.asyncio.Context()
        self._socket = _socket(self._context, zmq.ROUTER)
        self._desk: Desk | None = None
        self._reader: asyncio.Task[None] | None = None

    async def start(self, handle: Handler, abort: AbortHandler) -> None:
        """Bind a free port and begin to answer."""
        host = "127.0.0.1" if self._bind == "localhost" else f"[{self._bind}]" if ":" in self._bind else self._bind
        self._socket.bind(f"tcp://{host}:*")
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._desk = Desk(self._bus, self._server_id, handle, abort)
        self._reader = asyncio.create_task(self._read(self._desk), name="channel-server")

    async def close(self) -> None:
        """Answer what is outstanding, then disconnect."""
        if self._reader is not None and self._desk is not None:
            await self._desk.close()
            self._reader.cancel()
            await asyncio.wait([self._reader])
            self._reader = None
        await _close(self._context, [self._socket])

    async def _read(self, desk: Desk) -> None:
        while True:
            frames = await self._socket.recv_multipart()
            identity, token = frames[0], frames[1] if len(frames) > 1 else b""

            async def reply(data: bytes, identity: bytes = identity, token: bytes = token) -> None:
                await self._socket.send_multipart([identity, token, data])

            desk.receive(frames[2] if len(frames) == 3 else b"".join(frames[1:]), reply)


@dataclass
class _Line:
    """The connection to one server."""

    socket: zmq.asyncio.Socket
    monitor: Any  # an asyncio socket; pyzmq declares the blocking one
    tasks: list[asyncio.Task[None]]


class ZmqClient:
    """Asks servers by their addresses."""

    def __init__(self, bus: Bus) -> None:
        self._context = zmq.asyncio.Context()
        self._lines: dict[str, _Line] = {}
        self._asker = Asker(bus, self)
        self._closed = False
        self.generate, self.abort = self._asker.generate, self._asker.abort

    async def send(self, address: str, token: str, data: bytes) -> None:
        """See ``broker.channel_asker.Carrier``."""
        line = self._lines.get(address)
        if line is None:
            if not token:
                return  # nothing was ever asked there
            line = self._connect(address)
        try:
            await line.socket.send_multipart([token.encode(), data])
        except zmq.ZMQError as error:
            raise RequestFailed(f"{address}: {error}") from None

    async def forget(self, address: str) -> None:
        """Fail its outstanding requests and close its socket."""
        line = self._lines.pop(address, None)
        self._asker.fail_all("the server is gone", address)
        if line is not None:
            await self._hang_up(line)

    async def close(self) -> None:
        """Fail everything outstanding and disconnect."""
        self._closed = True
        await self._asker.close()
        lines = list(self._lines.values())
        self._lines.clear()
        for line in lines:
            await self._hang_up(line)
        await _close(self._context, [])

    def _connect(self, address: str) -> _Line:
        if self._closed:
            raise RequestFailed(f"{address}: the client was closed")
        socket = _socket(self._context, zmq.DEALER)
        socket.setsockopt(zmq.IMMEDIATE, 1)  # send only where someone is, instead of queueing for a server that is gone
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        monitor = socket.get_monitor_socket(LOST)
        try:
            socket.connect(address)
        except zmq.ZMQError as error:
            socket.disable_monitor()
            monitor.close(0)
            socket.close(0)
            raise RequestFailed(f"{address} is no address of a server: {error}") from None
        line = _Line(socket, monitor, [])
        line.tasks = [asyncio.create_task(self._read(line)), asyncio.create_task(self._watch(address, line))]
        self._lines[address] = line
        return line

    async def _read(self, line: _Line) -> None:
        while True:
            frames = await line.socket.recv_multipart()
            if len(frames) == 2:
                self._asker.answered(frames[0].decode(errors="replace"), frames[1])

    async def _watch(self, address: str, line: _Line) -> None:
        while True:
            event = await recv_monitor_message(line.monitor)
            refused = event["event"] == zmq.EVENT_CONNECT_RETRIED
            await _read_to_the_end(line.socket)
            self._asker.fail_all("nobody listens there" if refused else "the connection broke", address)

    async def _hang_up(self, line: _Line) -> None:
        for task in line.tasks:
            task.cancel()
        await asyncio.wait(line.tasks)
        line.socket.disable_monitor()
        line.monitor.close(0)
        line.socket.close()


async def _read_to_the_end(socket: zmq.asyncio.Socket) -> None:
    """Let the reading task have what had arrived before the connection ended: a server that closes answers first."""
    quiet = 0
    for _ in range(READ_TURNS):
        quiet = 0 if int(socket.get(zmq.EVENTS)) & zmq.POLLIN else quiet + 1
        if quiet > QUIET_TURNS:
            return
        await asyncio.sleep(0)


async def _close(context: zmq.asyncio.Context, sockets: list[zmq.asyncio.Socket]) -> None:
    """Close and wait, off the event loop, until what was sent has left or the linger time is over."""
    for socket in sockets:
        socket.close()
    with contextlib.suppress(zmq.ZMQError):  # already terminated
        await asyncio.to_thread(context.term)
