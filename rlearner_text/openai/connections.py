"""Limits of the HTTP server's connections: per peer, in total, time for a request to arrive."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from typing import Final, Protocol, cast

from aiohttp import web

from broker.contract import wire
from rlearner_text.openai.backends import ApiBackend
from rlearner_text.openai.callers import Call
from rlearner_text.openai.http_errors import HttpError
from rlearner_text.openai.request_bodies import LONG_BODY, B, parse

# for the header, and once more for the body; also how long an idle connection stays open
ARRIVAL_S: Final = 20.0
LINGER_S: Final = 1.0  # for the rest of a body that is not read


@dataclass(frozen=True)
class Limits:
    """How many connections an HTTP server holds, and how long a request may take to arrive.

    Attributes:
        total: connections of all peers together.
        per_peer: connections of one address.
        arrival_s: seconds for the header of a request, and again for its body.
    """

    total: int = 1024
    per_peer: int = 256
    arrival_s: float = ARRIVAL_S


class Connection(Protocol):
    """An open connection."""

    def abort(self) -> None:
        """Close it at once."""
        ...


class Connections:
    """Connections of one server. At a limit the oldest one without a complete request makes room
    for a new one.

    So half-open requests cannot shut out others, not even those of the same address. If all
    connections have a request in work, the new one is closed.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._peers: dict[Connection, str] = {}
        self._waiting: dict[Connection, None] = {}  # oldest first
        self._count: Counter[str] = Counter()

    def add(self, handler: Connection, peer: str) -> Connection | None:
        """Count a new connection; return the one to close, which may be the new one, or None."""
        full_peer = self._count[peer] >= self.limits.per_peer
        full = full_peer or len(self._peers) >= self.limits.total
        oldest = (
            waiting for waiting in self._waiting if not full_peer or self._peers[waiting] == peer
        )
        closing = next(oldest, handler) if full else None
        self._peers[handler] = peer
        self._waiting[handler] = None
        self._count[peer] += 1
        if closing is not None:
            self.remove(closing)
        return closing

    def work(self, handler: Connection, *, busy: bool) -> None:
        """Note that a request has arrived completely, or is answered."""
        self._waiting.pop(handler, None)
        if not busy and handler in self._peers:
            self._waiting[handler] = None

    def remove(self, handler: Connection) -> None:
        """Forget a closed connection; idempotent."""
        peer = self._peers.pop(handler, None)
        self._waiting.pop(handler, None)
        if peer is not None:
            self._count[peer] -= 1
            if not self._count[peer]:
                del self._count[peer]


class LimitedHandler(web.RequestHandler):
    """Reports its connection to ``Connections``; ``handshake`` is what was counted there before."""

    __slots__ = ("call", "connections", "handshake")

    def __init__(
        self,
        server: web.Server,
        connections: Connections,
        logger: object,
        handshake: Connection | None = None,
    ) -> None:
        # aiohttp closes a connection without a complete header when the keep-alive time is over
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            keepalive_timeout=connections.limits.arrival_s,
            lingering_time=LINGER_S,
            access_log=None,  # type: ignore[arg-type]
            logger=logger,  # type: ignore[arg-type]
        )
        self.connections = connections
        self.handshake = handshake
        self.call: Call | None = None  # of the request in work; a connection has one at a time

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if self.handshake is not None:
            self.connections.remove(self.handshake)
        name = transport.get_extra_info("peername")
        closing = self.connections.add(self, name[0] if name else "")
        if closing is not None:
            closing.abort()

    def abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    def connection_lost(self, exc: BaseException | None) -> None:
        self.connections.remove(self)
        super().connection_lost(exc)


def arrived(request: web.Request, *, busy: bool = True) -> None:
    """Note that the request has arrived completely, or with ``busy=False`` is answered."""
    handler = cast(LimitedHandler, request.protocol)
    handler.connections.work(handler, busy=busy)


def set_call(request: web.Request, call: Call | None) -> None:
    """Note whose request it is."""
    cast(LimitedHandler, request.protocol).call = call


def call_of(request: web.Request) -> Call | None:
    """Return the call of the request; None before its key has been accepted."""
    return cast(LimitedHandler, request.protocol).call


def backend_of(request: web.Request) -> ApiBackend:
    """Return the backend of the key, once it has been accepted."""
    call = call_of(request)
    assert call is not None
    return call.caller.backend


async def read_json(request: web.Request, model: type[B]) -> tuple[B, int]:
    """Return the parsed body and its size in bytes; see ``read_body`` and ``parse``.

    A long body is parsed in a thread, so that other requests go on.
    """
    raw = await read_body(request, wire.MAX_PAYLOAD_BYTES)
    if len(raw) < LONG_BODY:
        return parse(raw, model), len(raw)
    return await asyncio.to_thread(parse, raw, model), len(raw)


async def read_body(request: web.Request, limit: int) -> bytes:
    """Return the body, read within the time limit.

    Raises:
        web.HTTPRequestEntityTooLarge: if it is larger than ``limit`` bytes; a declared length is
            checked before reading.
        HttpError: with status 408, if it does not arrive in time.
    """
    if (request.content_length or 0) > limit:
        raise web.HTTPRequestEntityTooLarge(limit, request.content_length or 0)
    handler = cast(LimitedHandler, request.protocol)
    try:
        async with asyncio.timeout(handler.connections.limits.arrival_s):
            body = await request.read()
    except TimeoutError:
        raise HttpError(408, "the body did not arrive in time") from None
    arrived(request)
    return body
