"""Generation requests over ZeroMQ: the client's DEALER to the server's ROUTER, one socket per
server.

Delivery is at most once: if the connection breaks, messages are lost, and the client retries
elsewhere. Each ZeroMQ message is one frame, a ``bundle`` of (token, message) pairs; the client
chooses the token, which is empty for an abort. Processes of the same host and user use a local
socket. All others use TCP with CURVE: the server's key is part of its address, and the server
admits the keys that hubs announce in their presence.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import os
import re
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from broker.channel import local_sockets
from broker.channel.bundle import unpack_bundle
from broker.channel.carriers import AbortHandler, Handler, RequestChannel
from broker.channel.connection_limits import Connection, ConnectionLimits
from broker.channel.endpoint import Reply, RequestEndpoint
from broker.channel.hub_admission import HubAdmission
from broker.channel.zmq_address import ServerAddress, this_host
from broker.channel.zmq_client import ZmqClient
from broker.channel.zmq_options import open_socket, terminate_context
from broker.channel.zmq_socket import Frames, LoopSocket
from broker.errors import ConfigError, WireError
from broker.jetstream.bus import Bus
from broker.system.connections import addresses

log = logging.getLogger(__name__)

_ReplyTo = Callable[[str], Reply]  # of a token

# from the last reply to closing: with IMMEDIATE, unread replies are then lost
FAREWELL_S: Final = 0.1
ZAP: Final = "inproc://zeromq.zap.01"
ZAP_VERSION = b"1.0"
ZAP_YES = b"200"
ZAP_NO = b"400"
WATCHED: Final = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED
BIND: Final = re.compile(r"(?:\[([0-9a-fA-F:.]+)\]|([0-9.]+))(?::([0-9]{1,5}))?")
ALLOWED: Final = "expected an IP address of one interface of this host, IP or IP:PORT"


class ZmqServer:
    """Answers requests on a local socket, and on a port of one address with CURVE.

    Args:
        bind: ``IP`` or ``IP:PORT``, without port a free one; empty: only the local socket.

    Raises:
        ConfigError: if ``bind`` is not the address of one interface.
    """

    def __init__(self, bus: Bus, server_id: str, bind: str) -> None:
        self.address = ""
        self._bus, self._server_id, self._bind = bus, server_id, _parse_bind(bind)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._local_path = ""
        self._endpoint: RequestEndpoint | None = None
        self._sockets: list[LoopSocket] = []
        self._network: _Network | None = None

    async def start(self, handle: Handler, abort: AbortHandler) -> None:
        """Bind and start answering.

        Raises:
            ConfigError: if the address or port cannot be bound.
        """
        self._endpoint = RequestEndpoint(self._bus, self._server_id, handle, abort)
        local = self._bind_local()
        tcp = ""
        key = ""
        if self._bind is not None:
            try:
                self._network = _Network(self._context, self._bus, self._endpoint, *self._bind)
            except ConfigError:
                await self.close()
                raise
            tcp = self._network.endpoint
            key = self._network.key
            await self._network.start()
        self.address = str(ServerAddress(tcp, key, this_host() if tcp else "", local))

    def _bind_local(self) -> str:
        """Bind the local socket and return its name; empty if this host has no folder for it."""
        local_sockets.remove_dead_sockets()
        name = local_sockets.new_name()
        try:
            self._local_path = local_sockets.path_of(name)
        except local_sockets.UnsafeFolder as error:
            log.warning("no local socket, so processes of this host use TCP: %s", error)
            return ""
        socket = open_socket(self._context, zmq.ROUTER)
        try:
            socket.bind(f"ipc://{self._local_path}")
        except zmq.ZMQError as error:
            socket.close(0)
            log.warning(
                "no local socket, so processes of this host use TCP: %s: %s",
                self._local_path,
                error,
            )
            return ""
        self._sockets.append(LoopSocket(socket, self._receive))
        return name

    async def close(self) -> None:
        """Answer pending requests, then disconnect."""
        if self._endpoint is not None:
            await self._endpoint.close()
            await asyncio.sleep(FAREWELL_S)
            for socket in self._sockets:
                socket.close()
            self._sockets.clear()
            if self._network is not None:
                await self._network.close()
            self._endpoint = None
        await terminate_context(self._context)
        if self._local_path:
            with suppress(FileNotFoundError):
                os.unlink(self._local_path)

    def _receive(self, frames: Frames) -> None:
        endpoint = self._endpoint
        socket = self._sockets[0]
        assert endpoint is not None
        if len(frames) != 2:
            endpoint.refuse(
                f"{len(frames) - 1} parts where one is allowed",
                frames[1] if len(frames) > 1 else b"",
            )
            return
        route, data = frames

        def reply_to(token: str) -> Reply:
            async def reply(answer: bytes) -> None:
                socket.post(route, token, answer)

            return reply

        _receive_bundle(endpoint, data, reply_to, source="")


class _Network:
    """The part of a server that other users and hosts reach."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        bus: Bus,
        endpoint: RequestEndpoint,
        host: str,
        port: int,
    ) -> None:
        self._endpoint = endpoint
        public, secret = zmq.curve_keypair()
        self.key = public.decode()
        zap = context.socket(zmq.ROUTER)
        zap.linger = 0
        zap.bind(ZAP)  # first: without it ZeroMQ would ask nobody
        router = open_socket(context, zmq.ROUTER)
        router.curve_server = True
        router.curve_secretkey = secret
        router.zap_domain = b"generate"
        router.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        router.setsockopt(zmq.BACKLOG, 1024)
        monitor = router.get_monitor_socket(WATCHED)
        try:
            router.bind(f"tcp://{f'[{host}]' if ':' in host else host}:{port or '*'}")
        except zmq.ZMQError as error:
            router.disable_monitor()
            for socket in (monitor, router, zap):
                socket.close(0)
            raise ConfigError(
                "--bind", f"{host}:{port}" if port else host, _explain_bind_error(error)
            ) from None
        self.endpoint = router.getsockopt_string(zmq.LAST_ENDPOINT)
        self.limits = ConnectionLimits(int(self.endpoint.rpartition(":")[2]))
        self.admission = HubAdmission(bus, self.limits.drop)
        self._router = router
        self._zap = LoopSocket(zap, self._on_client)
        self._monitor = LoopSocket(monitor, self._on_event)
        self._socket = LoopSocket(router, self._receive, copy=False)
        self._scanning = asyncio.get_running_loop().call_later(self.limits.scan_s, self._scan)

    async def start(self) -> None:
        await self.admission.start()

    async def close(self) -> None:
        self._scanning.cancel()
        await self.admission.close()
        self._router.disable_monitor()
        self._monitor.close()
        self.limits.close()
        self._socket.close()
        self._zap.close()

    def _on_client(self, frames: Frames) -> None:
        """Answer ZeroMQ, which asks whether a client may connect (RFC 27)."""
        route, empty, version, request_id, _domain, address, _identity, mechanism, *credentials = (
            frames
        )
        is_curve = mechanism == b"CURVE" and len(credentials) == 1 and len(credentials[0]) == 32
        key = z85.encode(credentials[0]).decode() if is_curve else ""

        def answer(admitted: bool) -> None:
            status, text, user = (
                (ZAP_YES, b"OK", key.encode()) if admitted else (ZAP_NO, b"not admitted", b"")
            )
            self._zap.send_raw([route, empty, version, request_id, status, text, user, b""])

        if key and version == ZAP_VERSION:
            self.admission.ask(key, address.decode(errors="replace"), answer)
        else:
            answer(False)

    def _on_event(self, frames: Frames) -> None:
        event = parse_monitor_message(frames)
        if event["event"] == zmq.EVENT_ACCEPTED:
            self.limits.accepted(event["value"])
        else:
            self.limits.closed(event["value"])

    def _receive(self, frames: list[zmq.Frame]) -> None:
        self._monitor.read_all()  # the connection may be new
        key = str(frames[0].get("User-Id"))
        size = sum(len(frame.buffer) for frame in frames)
        connection = self.limits.received(int(frames[-1].get(zmq.SRCFD)), key, size)
        if (
            connection is None
            or connection.is_shut
            or connection.key != key
            or not self.admission.admits(key)
        ):
            return
        if len(frames) != 2:
            self._endpoint.refuse(f"{len(frames) - 1} parts where one is allowed", frames[-1].bytes)
            return
        _receive_bundle(
            self._endpoint, frames[1].bytes, self._replies(frames[0].bytes, connection), source=key
        )

    def _replies(self, route: bytes, connection: Connection) -> _ReplyTo:
        def reply_to(token: str) -> Reply:
            async def reply(answer: bytes) -> None:
                connection.posted += len(answer)
                self._socket.post(route, token, answer)

            return reply

        return reply_to

    def _scan(self) -> None:
        self._monitor.read_all()
        self._socket.read_all()
        self.limits.scan()
        for key in self.limits.take_excessive():
            log.warning(
                "a hub exceeded the limits of a connection; its key is refused for a minute"
            )
            self.admission.ban(key)
        self._scanning = asyncio.get_running_loop().call_later(self.limits.scan_s, self._scan)


def _receive_bundle(
    endpoint: RequestEndpoint, data: bytes, reply_to: _ReplyTo, source: str
) -> None:
    """Pass on the messages of a bundle."""
    try:
        entries = unpack_bundle(data)
    except WireError as error:
        endpoint.refuse(str(error), data)
        return
    for token, message in entries:
        endpoint.receive(message, reply_to(token), source)


def _parse_bind(bind: str) -> tuple[str, int] | None:
    """Return IP address and port, 0 for any.

    Raises:
        ConfigError: if it is not the address of one interface.
    """
    if not bind:
        return None
    match = BIND.fullmatch("127.0.0.1" if bind == "localhost" else bind)
    try:
        address = ipaddress.ip_address((match[1] or match[2]) if match else bind)
        port = int((match[3] or 0) if match else 0)
        if address.is_unspecified or address.is_multicast or port > 65535:
            raise ValueError(bind)
    except ValueError:
        raise ConfigError("--bind", bind, f"{ALLOWED}: {', '.join(_own_addresses())}") from None
    return str(address), port


def _own_addresses() -> list[str]:
    return [
        address for interface_addresses in addresses().values() for address in interface_addresses
    ]


def _explain_bind_error(error: zmq.ZMQError) -> str:
    if error.errno == errno.EADDRINUSE:
        return "another program uses this port; choose another one, or none for any free port"
    return f"{ALLOWED}: {', '.join(_own_addresses())} ({error.strerror})"


CHANNEL: Final = RequestChannel(ZmqServer, ZmqClient)
