"""The server's side of every carrier: decode a request, hand it to the handler, answer it."""

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

CLOSE_WITHIN_S: Final = 2.0  # how long aborted handlers have to return their partial output


def error_reply(server_id: str, request_id: str, error: str) -> wire.GenerateReply:
    """The answer to a request that cannot be served."""
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
    """Takes the requests of one server, runs each in a task of its own, and answers through what the carrier gave
    it.
    """

    def __init__(self, bus: Bus, server_id: str, handle: Handler, abort: AbortHandler) -> None:
        self._bus, self._server_id, self._handle, self._abort = bus, server_id, handle, abort
        self._answering: dict[asyncio.Task[None], str] = {}
        self._burying: set[asyncio.Task[None]] = set()
        self._closing = False

    def receive(self, data: bytes, reply: Reply) -> None:
        """One message from a client; returns at once.

        Args:
            data: the encoded message.
            reply: sends the bytes of the reply to the requester.
        """
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
        """Bytes that are no request, to the dead letters."""
        log.warning("malformed request: %s", reason)
        bury(self._bus, self._burying, reason, data)

    async def close(self) -> None:
        """Abort outstanding requests; handlers that do not return soon are cancelled and answered with an error."""
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
        except Exception:  # it must not end the reading of requests
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
        except Exception as error:  # one bad request or engine error costs only itself; the asker is told
            log.exception("request %s failed", request.request_id)
            await self._reject(request.request_id, f"{type(error).__name__}: {error}", reply)
            return
        await reply(data)


def bury(bus: Bus, burying: set[asyncio.Task[None]], reason: str, data: bytes) -> None:
    """Put bytes nobody could use to the dead letters without waiting for it."""

    async def work() -> None:
        try:
            await bus.dead_letter(GENERATE, seq=0, ticket=0, reason=reason, data=data)
        except RlearnerError as error:
            log.warning("a malformed message could not be put to the dead letters: %s", error)

    task = asyncio.create_task(work())
    burying.add(task)
    task.add_done_callback(burying.discard)
