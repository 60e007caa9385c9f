"""The client side of every carrier: sends requests and waits for their replies, with timeouts."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable, Coroutine
from typing import Any, Final, Protocol

from broker.channel.endpoint import store_dead_letter
from broker.contract import codec, wire
from broker.errors import RequestFailed, WireError
from broker.jetstream.bus import Bus

CLOCK_S: Final = 0.001  # a timer may be early by the resolution of the loop's clock

# address, reply, deadline, timeout_s, request_id
_Waiting = tuple[str, asyncio.Future[bytes], float, float, str]


class RequestCarrier(Protocol):
    """A transport for requests."""

    def post(
        self, address: str, token: str, data: bytes, asker: asyncio.Future[bytes] | None
    ) -> bool:
        """Send soon, unless ``asker`` is done before; return False if only ``send``, which costs a
        task, can do it.

        Raises:
            RequestFailed: if it cannot be sent.
        """
        ...

    async def send(self, address: str, token: str, data: bytes) -> None:
        """Send to a server, whose reply has the same token; an empty token requests no reply. May
        await a connection.

        Raises:
            RequestFailed: if it cannot be sent.
        """
        ...


class RequestClient:
    """The pending requests of one client.

    Args:
        format_address: returns the part of an address that messages show.
    """

    def __init__(
        self, bus: Bus, carrier: RequestCarrier, format_address: Callable[[str], str] = str
    ) -> None:
        self._bus = bus
        self._carrier = carrier
        self._format_address = format_address
        self._tokens = itertools.count(1)
        self._waiting: dict[str, _Waiting] = {}
        # for all requests: cheaper than a timer for each
        self._alarm: asyncio.TimerHandle | None = None
        self._alarm_at = math.inf
        self._background: set[asyncio.Task[None]] = set()

    async def generate(
        self, address: str, request: wire.GenerateRequest, *, timeout_s: float
    ) -> wire.GenerateReply:
        """See ``broker.channel.carriers.ChannelClient.generate``."""
        data = codec.encode(request)
        token = str(next(self._tokens))
        loop = asyncio.get_running_loop()
        future: asyncio.Future[bytes] = loop.create_future()
        until = loop.time() + timeout_s
        self._waiting[token] = (address, future, until, timeout_s, request.request_id)
        if until < self._alarm_at:
            self._set_alarm(loop, until)
        try:
            if not self._carrier.post(address, token, data, future):
                await self._until(future, self._carrier.send(address, token, data))
            answer = await future
        except asyncio.CancelledError:
            self._abort_later(address, request.request_id)
            raise
        finally:
            del self._waiting[token]
            if future.done() and not future.cancelled():
                # mark as retrieved, since it may have failed while sending failed
                future.exception()
        return self._read(address, request, answer)

    async def abort(self, address: str, request_id: str) -> None:
        """See ``broker.channel.carriers.ChannelClient.abort``; best effort."""
        try:
            async with asyncio.timeout(1.0):
                await self._carrier.send(
                    address, "", codec.encode(wire.AbortRequest(request_id=request_id))
                )
        except (TimeoutError, RequestFailed):
            return  # an unreachable server has nothing to abort

    def answered(self, token: str, data: bytes, address: str = "") -> None:
        """Deliver a reply to its request; drop it if no request is waiting.

        Args:
            address: where the reply comes from; a server cannot reply to the requests to another
                one.
        """
        waiting = self._waiting.get(token)
        if waiting is not None and not waiting[1].done() and address in ("", waiting[0]):
            waiting[1].set_result(data)

    def failed(self, token: str, reason: str) -> None:
        """Fail a request that will get no reply."""
        waiting = self._waiting.get(token)
        if waiting is not None and not waiting[1].done():
            waiting[1].set_exception(RequestFailed(f"{self._format_address(waiting[0])}: {reason}"))

    def fail_all(self, reason: str, address: str | None = None) -> None:
        """Fail all requests to this address (None: to any)."""
        for token, (request_address, *_) in list(self._waiting.items()):
            if address is None or request_address == address:
                self.failed(token, reason)

    def refuse(self, address: str, reason: str, data: bytes) -> None:
        """Store an unreadable message as a dead letter and fail all requests to its sender, as any
        may be meant.
        """
        store_dead_letter(self._bus, self._background, reason, data)
        self.fail_all(reason, address)

    async def close(self) -> None:
        """Fail all pending requests."""
        self.fail_all("the client was closed")
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
            self._alarm_at = math.inf
        if self._background:
            await asyncio.wait(self._background, timeout=1.0)

    def _set_alarm(self, loop: asyncio.AbstractEventLoop, at: float) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm = loop.call_at(at, self._expire)
        self._alarm_at = at

    def _expire(self) -> None:
        """Fail the requests that are due, and set the timer for the next one, if any."""
        loop = asyncio.get_running_loop()
        now = loop.time() + CLOCK_S
        next_at = math.inf
        self._alarm = None
        self._alarm_at = math.inf
        for address, future, until, timeout_s, request_id in self._waiting.values():
            if future.done():
                continue
            if until > now:
                next_at = min(next_at, until)
                continue
            future.set_exception(
                RequestFailed(f"{self._format_address(address)}: no answer within {timeout_s:g} s")
            )
            self._abort_later(address, request_id)
        if next_at < math.inf:
            self._set_alarm(loop, next_at)

    def _abort_later(self, address: str, request_id: str) -> None:
        task = asyncio.create_task(self.abort(address, request_id))
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _until(
        self, future: asyncio.Future[bytes], sending: Coroutine[Any, Any, None]
    ) -> None:
        """Send until done, or until the future is done."""
        task = asyncio.create_task(sending)
        either: list[asyncio.Future[Any]] = [task, future]
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if task.done() and not future.done():
                task.result()
        finally:
            task.cancel()

    def _read(self, address: str, request: wire.GenerateRequest, data: bytes) -> wire.GenerateReply:
        try:
            reply = codec.decode(data, wire.GenerateReply)
        except WireError as error:
            store_dead_letter(self._bus, self._background, str(error), data)
            raise RequestFailed(f"{self._format_address(address)}: {error}") from None
        # empty: the server could not read the request
        if reply.request_id not in (request.request_id, ""):
            problem = f"answered request {reply.request_id!r} instead of {request.request_id!r}"
            raise RequestFailed(f"{self._format_address(address)}: {problem}")
        return reply
