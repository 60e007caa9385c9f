"""The fast side: generation requests go straight from the asker to one server and back.

Two carriers with one contract, chosen by ``broker.channel``: ZeroMQ (DEALER/ROUTER, address from presence) and NATS
request/reply, for sites without a direct route. Neither stores anything: a request that gets no answer is asked again
elsewhere by the asker. What the carriers have in common stands in ``channel_desk`` (server) and ``channel_asker``
(client).
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

CHANNELS: Final[dict[str, str]] = {
    "zmq": "broker.channel.over_zmq:CHANNEL",
    "nats": "broker.channel.over_nats:CHANNEL",
}


class ChannelServer(Protocol):
    """Answers requests; handlers run concurrently, one task per request.

    A request that does not decode goes to the dead letters and is answered with finish_reason ``error``, as is one
    whose handler raises.

    Attributes:
        address: what presence announces; known once started.
    """

    address: str

    async def start(self, handle: Handler, abort: AbortHandler) -> None:
        """Begin to answer.

        Args:
            handle: answers one request.
            abort: told the request_id whose handler should return soon with what it has; unknown ids are to be ignored.
        """
        ...

    async def close(self) -> None:
        """Take no more requests, abort those outstanding, answer them (with an error after a moment) and disconnect."""
        ...


class ChannelClient(Protocol):
    """Asks any number of servers, many requests at once."""

    async def generate(self, address: str, request: wire.GenerateRequest, *, timeout_s: float) -> wire.GenerateReply:
        """Ask the server at ``address``. When cancelled or out of time, the server is told to abort.

        Raises:
            RequestFailed: no answer within ``timeout_s``, nobody there, the connection broke, or an answer that does
            not decode.
            WireError: the request breaks its own rules; nothing was sent.
        """
        ...

    async def abort(self, address: str, request_id: str) -> None:
        """Ask the server to end a request early; its reply then comes to ``generate`` as usual."""
        ...

    async def forget(self, address: str) -> None:
        """The server is gone: fail its outstanding requests at once with RequestFailed."""
        ...

    async def close(self) -> None:
        """Fail what is outstanding with RequestFailed and disconnect."""
        ...


@dataclass(frozen=True)
class RequestChannel:
    """One way for requests to travel: its server, made of (bus, server_id, bind), and its client, made of the bus."""

    server: Callable[[Bus, str, str], ChannelServer]
    client: Callable[[Bus], ChannelClient]


def load_channel(kind: str) -> RequestChannel:
    """Return a channel by name.

    Raises:
        ConfigError: if there is no such channel, or it is not a ``RequestChannel``.
    """
    found = resolve("channels", kind, CHANNELS)
    if not isinstance(found, RequestChannel):
        raise ConfigError(
            "broker.channel", kind, f"a broker.channel.carriers.RequestChannel, not {type(found).__name__}"
        )
    return found


def serve(kind: str, bus: Bus, server_id: str, *, bind: str = "127.0.0.1") -> ChannelServer:
    """Return a server of a channel of the registry.

    Raises:
        ConfigError: if there is no such channel, or the bind address is not a loopback address.
    """
    return load_channel(kind).server(bus, server_id, bind)


def connect(kind: str, bus: Bus) -> ChannelClient:
    """Return a client of a channel of the registry.

    Raises:
        ConfigError: if there is no such channel.
    """
    return load_channel(kind).client(bus)
