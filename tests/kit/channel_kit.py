"""Servers and hubs of the request channel over the network, and clients that keep to no rule."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace

import zmq

from broker.channel.over_zmq import ZmqServer
from broker.channel.zmq_address import ServerAddress
from broker.channel.zmq_client import ZmqClient
from broker.contract import wire
from broker.jetstream.bus import Bus
from broker.runtime.announce import Announcer


def ask(name: str = "r1", tokens: int = 3, **more: object) -> wire.GenerateRequest:
    return wire.GenerateRequest(
        request_id=name,
        conversation_id="c1",
        token_ids=wire.column(range(tokens), "<i4"),
        sampling=wire.SamplingParams(max_tokens=4),
        **more,  # type: ignore[arg-type]
    )


def echo(asked: wire.GenerateRequest, server: str = "s1") -> wire.GenerateReply:
    """The context, as if sampled."""
    tokens = asked.token_ids.array()
    return wire.GenerateReply(
        request_id=asked.request_id,
        server=server,
        token_ids=wire.column(tokens, "<i4"),
        logprobs=wire.column([-0.5] * len(tokens), "<f4"),
        version_runs=wire.column([3, len(tokens)], "<i4"),
        finish_reason="stop",
        policy_version=3,
    )


@dataclass
class NetworkServer:
    """A server that answers at once, and what it was asked."""

    server: ZmqServer
    asked: list[str] = field(default_factory=list)

    @property
    def address(self) -> str:
        """Its address for other hosts and users."""
        return str(replace(ServerAddress.parse(self.server.address), local=""))

    @property
    def tcp(self) -> str:
        return ServerAddress.parse(self.server.address).tcp

    @property
    def key(self) -> str:
        return ServerAddress.parse(self.server.address).key

    async def handle(self, asked: wire.GenerateRequest) -> wire.GenerateReply:
        self.asked.append(asked.request_id)
        return echo(asked)


@asynccontextmanager
async def network_server(
    bus: Bus, name: str = "s1", bind: str = "127.0.0.1"
) -> AsyncIterator[NetworkServer]:
    server = ZmqServer(bus, name, bind)
    made = NetworkServer(server)
    await server.start(made.handle, lambda request_id: None)
    try:
        yield made
    finally:
        await server.close()


class HubClient(ZmqClient):
    """A hub's client, whose presence is announced while it is open, unless it is not to be."""

    def __init__(self, bus: Bus, name: str = "hub", role: str = "envhub") -> None:
        super().__init__(bus)
        self.presence = wire.Presence(
            role=role, id=name, host="h", pid=1, state="serving", key=self.key
        )
        self.announcer = Announcer(bus, lambda: self.presence)
        self.announce = self.announcer.poke

    async def start(self) -> None:
        await self.announcer.start()

    async def leave(self) -> None:
        with suppress(asyncio.CancelledError):
            await self.announcer.close()


@asynccontextmanager
async def hub_client(
    bus: Bus, name: str = "hub", *, present: bool = True
) -> AsyncIterator[HubClient]:
    client = HubClient(bus, name)
    if present:
        await client.start()
    try:
        yield client
    finally:
        if present:
            await client.leave()
        await client.close()


@asynccontextmanager
async def raw_dealer(
    endpoint: str, server_key: str = "", keys: tuple[str, bytes] | None = None
) -> AsyncIterator[zmq.Socket[bytes]]:
    """A DEALER without limits: with ``server_key`` encrypted, by the given key pair or a new one."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    try:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, 10)
        if server_key:
            public, secret = zmq.curve_keypair()
            if keys is not None:
                public, secret = keys[0].encode(), keys[1]
            socket.curve_serverkey = server_key.encode()
            socket.curve_publickey, socket.curve_secretkey = public, secret
        socket.connect(endpoint)
        yield socket
    finally:
        socket.close(0)
        await asyncio.to_thread(context.term)
