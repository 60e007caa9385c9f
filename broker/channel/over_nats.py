"""Generation requests over NATS request/reply, for sites without a direct route from hub to server.

Delivery is at most once. Each client has one inbox for all replies; NATS reports at once if nothing
listens.
"""

from __future__ import annotations

import asyncio
from typing import Final

from broker.channel.carriers import AbortHandler, Handler, RequestChannel
from broker.channel.client import RequestClient
from broker.channel.endpoint import RequestEndpoint
from broker.contract.streams import GENERATE
from broker.errors import ConfigError, RequestFailed
from broker.jetstream.bus import Bus
from broker.nats.client import Msg, nats_errors
from broker.nats.nats_errors import Disconnected
from broker.nats.subscription import LinkSubscription


class NatsServer:
    """Answers requests on the subject of its id."""

    def __init__(self, bus: Bus, server_id: str, bind: str) -> None:
        self.address = server_id
        self._bus = bus
        self._endpoint: RequestEndpoint | None = None
        self._subscribed: LinkSubscription | None = None

    async def start(self, handle: Handler, abort: AbortHandler) -> None:
        """Subscribe and start answering."""
        self._endpoint = RequestEndpoint(self._bus, self.address, handle, abort)
        subject = GENERATE.subject(self._bus.run, self.address)
        self._subscribed = await self._bus.link.subscribe(subject, self._on_request)

    async def close(self) -> None:
        """Answer pending requests, then unsubscribe."""
        if self._endpoint is not None and self._subscribed is not None:
            await self._endpoint.close()
            await self._subscribed.close()
            self._subscribed = None

    async def _on_request(self, message: Msg) -> None:
        assert self._endpoint is not None

        async def reply(data: bytes) -> None:
            if message.reply:
                await self._reply(message.reply, data)

        self._endpoint.receive(message.data, reply)

    async def _reply(self, subject: str, data: bytes) -> None:
        """Send a reply, waiting for the connection: the client may still be connected."""
        link = self._bus.link
        while not link.closed:
            try:
                await link.ready()
                await link.send(subject, data)
                return
            except Disconnected:
                continue


class NatsClient:
    """Sends requests to servers by their ids."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._link = bus.link
        # the broker knows who this is
        self.key = ""
        self.announce = _announce_nothing
        self._asker = RequestClient(bus, self)
        self._inbox = f"{self._link.inbox}.{self._link.next_token()}"
        self._subscribed: LinkSubscription | None = None
        self._listening = asyncio.Lock()
        self._closed = False
        self.generate = self._asker.generate
        self.abort = self._asker.abort

    def post(
        self, address: str, token: str, data: bytes, asker: asyncio.Future[bytes] | None
    ) -> bool:
        """Return False: nats-py has only coroutines."""
        return False

    async def send(self, address: str, token: str, data: bytes) -> None:
        """See ``broker.channel.client.RequestCarrier``."""
        if self._closed:
            raise RequestFailed(f"{address}: the client was closed")
        try:
            subject = GENERATE.subject(self._bus.run, address)
            await self._listen()
            await self._link.ready()
            await self._link.send(subject, data, reply=f"{self._inbox}.{token}" if token else "")
        except (Disconnected, nats_errors.MaxPayloadError, ConfigError) as error:
            raise RequestFailed(f"{address}: {error}") from None

    async def _listen(self) -> None:
        async with self._listening:
            if self._subscribed is None:
                self._subscribed = await self._link.subscribe(f"{self._inbox}.*", self._on_reply)
                self._link.on_disconnect.add(self._on_disconnect)

    async def forget(self, address: str) -> None:
        """Fail the pending requests to a server."""
        self._asker.fail_all("the server is gone", address)

    async def close(self) -> None:
        """Fail all pending requests and unsubscribe."""
        self._closed = True
        await self._asker.close()
        self._link.on_disconnect.discard(self._on_disconnect)
        if self._subscribed is not None:
            await self._subscribed.close()
            self._subscribed = None

    async def _on_reply(self, message: Msg) -> None:
        token = message.subject.rpartition(".")[2]
        if message.headers is not None and message.headers.get("Status") == "503":
            self._asker.failed(token, "nothing listens there")
        else:
            self._asker.answered(token, message.data)

    def _on_disconnect(self) -> None:
        self._asker.fail_all("lost the connection to the broker")


def _announce_nothing() -> None:
    """Announce nothing."""


CHANNEL: Final = RequestChannel(NatsServer, NatsClient)
