"""The fast side: generation requests go straight from the asker to one server and back.

Two carriers with one contract, chosen by ``broker.channel``: ZeroMQ (DEALER/ROUTER, address from presence) and NATS
request/reply, for sites without a direct route. Neither stores anything: a request that gets no answer is asked again
elsewhere by the asker.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

from broker import wire
from broker.jetstream import Bus

Handler = Callable[[wire.GenerateRequest], Awaitable[wire.GenerateReply]]
AbortHandler = Callable[[str], None]


class ChannelServer(Protocol):
    """Answers requests; handlers run concurrently, one task per request."""

    address: str  # what presence announces

    async def start(self, handle: Handler, abort: AbortHandler) -> None: ...
    async def close(self) -> None: ...


class ChannelClient(Protocol):
    """Asks any number of servers, many requests at once."""

    async def generate(self, address: str, request: wire.GenerateRequest, *, timeout_s: float) -> wire.GenerateReply:
        """Ask the server at ``address``.

        Raises:
            RequestFailed: no answer within ``timeout_s``, or one that does not decode.
        """
        ...

    async def abort(self, address: str, request_id: str) -> None:
        """Ask the server to end a request early; its reply then comes to ``generate`` as usual."""
        ...

    async def forget(self, address: str) -> None:
        """The server is gone: fail its outstanding requests at once with RequestFailed."""
        ...

    async def close(self) -> None: ...


def serve(kind: str, bus: Bus, server_id: str, *, bind: str = "127.0.0.1") -> ChannelServer:
    """A server of the given kind (``zmq`` or ``nats``)."""
    raise NotImplementedError


def connect(kind: str, bus: Bus) -> ChannelClient:
    """A client of the given kind."""
    raise NotImplementedError
