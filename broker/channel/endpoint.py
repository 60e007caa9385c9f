"""The server side of every carrier: decodes requests, passes them to the handler, sends the replies."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final

from broker.channel.carriers import AbortHandler, Handler
from broker.contract import codec, wire
from broker.contract.streams import GENERATE
from broker.errors import RlearnerError, WireError
from broker.jetstream.bus import Bus

log = logging.getLogger(__name__)

Reply = Callable[[bytes], Awaitable[None]]

CLOSE_WITHIN_S: Final = 2.0  # for aborted handlers to return their partial output


def error_reply(server_id: str, request_id: str, error: str) -> wire.GenerateReply:
    """Return the reply to a request that cannot be served."""
    nothing = wire.column((), "<i4")
    return wire.GenerateReply(
        request_id=request_id,
        server=server_id,
        token_ids=nothing,
        logprobs=wire.column((), "<f4"),
        version_runs=nothing,
        finish_reason="error",
        policy_version=-1,
        error=" ".join(error.split()) or "unknown",
    )


class RequestEndpoint:
    """Receives the requests of one server and runs each in its own task."""

    def __init__(self, bus: Bus, server_id: str, handle: Handler, abort: AbortHandler) -> None:
        self._bus, self._server_id, self._handle, self._abort = bus, server_id, handle, abort
        self._answering: dict[asyncio.Task[None], str] = {}
        self._burying: set[asyncio.Task[None]] = set()
        self._closing = False

    def receive(self, data: bytes, reply: Reply) -> None:
        """Start handling one encoded message from a client, to which ``reply`` sends the encoded reply."""
        try:
            message: wire.Message = codec.decode(data, wire.GenerateRequest, wire.AbortRequest)
        except WireError as error:
            self.refuse(str(error), data)
            self._spawn("", self._reject("", str(error), reply))
            return
        if isinstance(message, wire.AbortRequest):
            self._tell_abort(message.request_id)
        elif isinstance(message, wire.GenerateRequest) and not self._closing:
            self._spawn(message.request_id, self._answer(message, reply))
        elif isinstance(message, wire.GenerateRequest):
            self._spawn("", self._reject(message.request_id, "the server is closing", reply))

    def refuse(self, reason: str, data: bytes) -> None:
        """Store an unreadable request as a dead letter."""
        log.warning("malformed request: %s", reason)
        bury(self._bus, self._burying, reason, data)

    async def close(self) -> None:
        """Abort pending requests; cancel handlers that do not return soon and reply with an error."""
        self._closing = True
        for request_id in filter(None, list(self._answering.values())):
            self._tell_abort(request_id)
        if self._answering:
            await asyncio.wait(self._answering, timeout=CLOSE_WITHIN_S)
        for task in list(self._answering):
            task.cancel()
        if self._answering or self._burying:
            await asyncio.wait([*self._answering, *self._burying], timeout=CLOSE_WITHIN_S)

    def _spawn(self, request_id: str, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._answering[task] = request_id
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        request_id = self._answering.pop(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("request %s could not be answered: %s: %s", request_id, type(error).__name__, error)

    def _tell_abort(self, request_id: str) -> None:
        try:
            self._abort(request_id)
        except Exception:  # must not stop the server from reading requests
            log.exception("aborting %s failed", request_id)

    async def _reject(self, request_id: str, error: str, reply: Reply) -> None:
        await reply(codec.encode(error_reply(self._server_id, request_id, error)))

    async def _answer(self, request: wire.GenerateRequest, reply: Reply) -> None:
        try:
            data = codec.encode(await self._handle(request))
        except asyncio.CancelledError:
            if not self._closing:
                raise
            await self._reject(request.request_id, "the server is closing", reply)
            return
        except Exception as error:  # a bad request or engine error must not affect other requests
            log.exception("request %s failed", request.request_id)
            await self._reject(request.request_id, f"{type(error).__name__}: {error}", reply)
            return
        await reply(data)


def bury(bus: Bus, burying: set[asyncio.Task[None]], reason: str, data: bytes) -> None:
    """Start storing unusable bytes as a dead letter."""

    async def work() -> None:
        try:
            await bus.dead_letter(GENERATE, seq=0, ticket=0, reason=reason, data=data)
        except RlearnerError as error:
            log.warning("cannot store a malformed message as a dead letter: %s", error)

    task = asyncio.create_task(work())
    burying.add(task)
    task.add_done_callback(burying.discard)
