"""The request channel: generation requests go directly from a client to one server and back.

``broker.channel`` selects one of two carriers: ZeroMQ (DEALER/ROUTER, address and keys from
presence) or NATS request/reply, for sites without a direct route. Neither stores anything: a client
sends an unanswered request to another server. The code common to the carriers is in ``endpoint``
(server) and ``client``.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final, Protocol

from broker.contract import wire
from broker.errors import ConfigError
from broker.jetstream.bus import Bus
from broker.settings.registry import resolve

Handler = Callable[[wire.GenerateRequest], Awaitable[wire.GenerateReply]]
AbortHandler = Callable[[str], None]

CHANNELS: Final = {
    "zmq": "broker.channel.over_zmq:CHANNEL",
    "nats": "broker.channel.over_nats:CHANNEL",
}


class ChannelServer(Protocol):
    """Answers requests; handlers run concurrently, one task per request.

    A request that does not decode becomes a dead letter and is answered with finish_reason
    ``error``, as is one whose handler raises.
    """

    address: str  # announced by presence; known once started

    async def start(self, handle: Handler, abort: AbortHandler) -> None:
        """Start answering requests.

        Args:
            handle: answers one request.
            abort: called with the request_id whose handler should return early; must ignore unknown
                ids.
        """
        ...

    async def close(self) -> None:
        """Stop accepting requests, abort and answer pending ones, after a moment with an error, and
        disconnect.
        """
        ...


class ChannelClient(Protocol):
    """Sends requests to any number of servers, many at once.

    Attributes:
        key: public key that this process's presence must announce, so that servers admit it; empty:
            none is needed.
        announce: called while a server waits for that presence; replaced by the owner.
    """

    key: str
    announce: Callable[[], None]

    async def generate(
        self, address: str, request: wire.GenerateRequest, *, timeout_s: float
    ) -> wire.GenerateReply:
        """Send a request to the server at ``address``; abort it there on cancellation and timeout.

        Raises:
            RequestFailed: if the server cannot be reached or the connection breaks, or the reply is
                late or malformed.
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


@dataclass(frozen=True)
class RequestChannel:
    """One way for requests to travel: its server, made of (bus, server_id, bind), and its client,
    made of the bus.
    """

    server: Callable[[Bus, str, str], ChannelServer]
    client: Callable[[Bus], ChannelClient]


def load_channel(kind: str) -> RequestChannel:
    """Return a channel by name.

    Raises:
        ConfigError: if there is no such channel, or it is not a ``RequestChannel``.
    """
    channel = resolve("channels", kind, CHANNELS)
    if not isinstance(channel, RequestChannel):
        allowed = f"a broker.channel.carriers.RequestChannel, not {type(channel).__name__}"
        raise ConfigError("broker.channel", kind, allowed)
    return channel


def make_server(kind: str, bus: Bus, server_id: str, *, bind: str = "127.0.0.1") -> ChannelServer:
    """Return a server of a channel of the registry.

    Args:
        bind: address of the interface on which other hosts and users reach it, IP or IP:PORT.

    Raises:
        ConfigError: if there is no such channel, or ``bind`` is not the address of one interface.
    """
    return load_channel(kind).server(bus, server_id, bind)


def make_client(kind: str, bus: Bus) -> ChannelClient:
    """Return a client of a channel of the registry.

    Raises:
        ConfigError: if there is no such channel.
    """
    return load_channel(kind).client(bus)
