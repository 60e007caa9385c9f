"""The request channel: generation requests go directly from a client to one server and back.

``broker.channel`` selects one of two carriers: ZeroMQ (DEALER/ROUTER, address from presence) or NATS request/reply,
for sites without a direct route. Neither stores anything: a client sends an unanswered request to another server. The
code common to the carriers is in ``endpoint`` (server) and ``client``.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final, Protocol

from broker.contract import wire
from broker.jetstream.bus import Bus
from broker.settings.registry import resolve

Handler = Callable[[wire.GenerateRequest], Awaitable[wire.GenerateReply]]
AbortHandler = Callable[[str], None]

SERVERS: Final = {"zmq": "broker.channel.over_zmq:ZmqServer", "nats": "broker.channel.over_nats:NatsServer"}
CLIENTS: Final = {"zmq": "broker.channel.over_zmq:ZmqClient", "nats": "broker.channel.over_nats:NatsClient"}


class ChannelServer(Protocol):
    """Answers requests; handlers run concurrently, one task per request.

    A request that does not decode becomes a dead letter and is answered with finish_reason ``error``, as is one whose
    handler raises.
    """

    address: str  # announced by presence; known once started

    async def start(self, handle: Handler, abort: AbortHandler) -> None:
        """Start answering requests.

        Args:
            handle: answers one request.
            abort: called with the request_id whose handler should return early; must ignore unknown ids.
        """
        ...

    async def close(self) -> None:
        """Stop accepting requests, abort and answer pending ones, after a moment with an error, and disconnect."""
        ...


class ChannelClient(Protocol):
    """Sends requests to any number of servers, many at once."""

    async def generate(self, address: str, request: wire.GenerateRequest, *, timeout_s: float) -> wire.GenerateReply:
        """Send a request to the server at ``address``; abort it there on cancellation and timeout.

        Raises:
            RequestFailed: if the server cannot be reached or the connection breaks, or the reply is late or malformed.
            WireError: if the request breaks its own rules; nothing was sent.
        """
        ...

    async def abort(self, address: str, request_id: str) -> None:
        """Ask the server to end a request early; ``generate`` returns its reply as usual."""
        ...

    async def forget(self, address: str) -> None:
        """Fail the pending requests of a server that no longer exists with RequestFailed."""
        ...

    async def close(self) -> None:
        """Fail pending requests with RequestFailed and disconnect."""
        ...


def serve(kind: str, bus: Bus, server_id: str, *, bind: str = "127.0.0.1") -> ChannelServer:
    """Create a server of the given kind (``zmq`` or ``nats``).

    Raises:
        ConfigError: if the kind is unknown or the bind address is not loopback.
    """
    server: ChannelServer = resolve("channels", kind, SERVERS)(bus, server_id, bind)
    return server


def connect(kind: str, bus: Bus) -> ChannelClient:
    """Create a client of the given kind.

    Raises:
        ConfigError: if the kind is unknown.
    """
    client: ChannelClient = resolve("channels", kind, CLIENTS)(bus)
    return client
