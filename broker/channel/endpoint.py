"""The server side of every carrier: decodes requests, passes them to the handler, sends the
replies.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from broker.channel.carriers import AbortHandler, Handler
from broker.contract import codec, wire
from broker.contract.streams import GENERATE
from broker.errors import RlearnerError, WireError
from broker.jetstream.bus import Bus

log = logging.getLogger(__name__)

Reply = Callable[[bytes], Awaitable[None]]

CLOSE_WITHIN_S: Final = 2.0  # for aborted handlers to return their partial output
MAX_PENDING_DEAD_LETTERS: Final = (
    16  # dead letters being stored; further malformed messages leave none
)
MAX_TASKS: Final = 65_536  # of all clients, replies that wait for a slow broker included


@dataclass(frozen=True)
class RequestLimits:
    """How many requests, and encoded bytes of them, a server answers at once, for all clients and
    for one.
    """

    count: int = 16_384
    bytes: int = 1 << 30
    count_of_client: int = 8_192
    bytes_of_client: int = 1 << 28


def error_reply(
    server_id: str, request_id: str, error: str, reason: wire.FinishReason = "error"
) -> wire.GenerateReply:
    """Return the reply to a request that cannot be served, or not now."""
    no_ints = wire.column((), "<i4")
    return wire.GenerateReply(
        request_id=request_id,
        server=server_id,
        token_ids=no_ints,
        logprobs=wire.column((), "<f4"),
        version_runs=no_ints,
        finish_reason=reason,
        policy_version=-1,
        error=" ".join(error.split()) or "unknown",
    )


class RequestEndpoint:
    """Receives the requests of one server and runs each in its own task.

    Args:
        most: requests and bytes that are answered at once.
    """

    def __init__(
        self,
        bus: Bus,
        server_id: str,
        handle: Handler,
        abort: AbortHandler,
        most: RequestLimits | None = None,
    ) -> None:
        self._bus = bus
        self._server_id = server_id
        self._handle = handle
        self._abort = abort
        self._most = most or RequestLimits()
        self._load: dict[str, tuple[int, int]] = {}  # by client, empty for all: requests and bytes
        self._answering: dict[asyncio.Task[None], str] = {}
        self._tasks = Counter[str]()  # of each client that has any
        self._dead_letter_tasks: set[asyncio.Task[None]] = set()
        self._closing = False

    def receive(self, data: bytes, reply: Reply, source: str = "") -> None:
        """Start handling one encoded message from a client, to which ``reply`` sends the encoded
        reply.

        Messages of a client that floods the server are dropped, and only those.

        Args:
            source: the client, if it is known; no client may take all of the server's room.
        """
        if self._tasks[source] >= MAX_TASKS // (len(self._tasks) + 1):
            return
        try:
            message: wire.Message = codec.decode(data, wire.GenerateRequest, wire.AbortRequest)
        except WireError as error:
            self.refuse(str(error), data)
            self._spawn("", self._reject("", str(error), reply), source)
            return
        if isinstance(message, wire.AbortRequest):
            self._abort_request(message.request_id)
        elif isinstance(message, wire.GenerateRequest):
            if self._closing:
                self._spawn(
                    "", self._reject(message.request_id, "the server is closing", reply), source
                )
                return
            if problem := self._reserve(source, len(data)):
                self._spawn("", self._reject(message.request_id, problem, reply, "busy"), source)
                return
            task = self._spawn(message.request_id, self._answer(message, reply), source)
            task.add_done_callback(lambda _: self._release(source, len(data)))

    def refuse(self, reason: str, data: bytes) -> None:
        """Store an unreadable request as a dead letter."""
        if len(self._dead_letter_tasks) < MAX_PENDING_DEAD_LETTERS:
            log.warning("malformed request: %s", reason)
        store_dead_letter(self._bus, self._dead_letter_tasks, reason, data)

    async def close(self) -> None:
        """Abort pending requests; cancel slow handlers and reply with an error for them."""
        self._closing = True
        for request_id in filter(None, list(self._answering.values())):
            self._abort_request(request_id)
        if self._answering:
            await asyncio.wait(self._answering, timeout=CLOSE_WITHIN_S)
        for task in list(self._answering):
            task.cancel()
        if self._answering or self._dead_letter_tasks:
            await asyncio.wait([*self._answering, *self._dead_letter_tasks], timeout=CLOSE_WITHIN_S)

    def _reserve(self, source: str, size: int) -> str:
        """Take room for a request; return why there is none, else an empty text."""
        most = self._most
        limits = {"": (most.count, most.bytes)} | (
            {source: (most.count_of_client, most.bytes_of_client)} if source else {}
        )
        for name, (count, num_bytes) in limits.items():
            usage = self._load.get(name, (0, 0))
            if usage[0] >= count or usage[1] + size > num_bytes:
                owner = " of this client" if name else ""
                return f"too many requests{owner} at once: {usage[0]}, of {usage[1] >> 20} MiB"
        for name in limits:
            usage = self._load.get(name, (0, 0))
            self._load[name] = usage[0] + 1, usage[1] + size
        return ""

    def _release(self, source: str, size: int) -> None:
        for name in {source, ""}:
            count, num_bytes = self._load[name]
            self._load[name] = count - 1, num_bytes - size
            if count == 1:
                del self._load[name]

    def _spawn(
        self, request_id: str, work: Coroutine[Any, Any, None], source: str
    ) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._answering[task] = request_id
        self._tasks[source] += 1
        task.add_done_callback(partial(self._done, source))
        return task

    def _done(self, source: str, task: asyncio.Task[None]) -> None:
        request_id = self._answering.pop(task)
        self._tasks[source] -= 1
        if not self._tasks[source]:
            del self._tasks[source]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error(
                "request %s could not be answered: %s: %s", request_id, type(error).__name__, error
            )

    def _abort_request(self, request_id: str) -> None:
        try:
            self._abort(request_id)
        except Exception:  # must not stop the server from reading requests
            log.exception("aborting %s failed", request_id)

    async def _reject(
        self, request_id: str, error: str, reply: Reply, reason: wire.FinishReason = "error"
    ) -> None:
        await reply(codec.encode(error_reply(self._server_id, request_id, error, reason)))

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


def store_dead_letter(bus: Bus, pending: set[asyncio.Task[None]], reason: str, data: bytes) -> None:
    """Start storing unusable bytes as a dead letter, unless many are being stored."""
    if len(pending) >= MAX_PENDING_DEAD_LETTERS:
        return

    async def store() -> None:
        try:
            await bus.dead_letter(GENERATE, seq=0, ticket=0, reason=reason, data=data)
        except RlearnerError as error:
            log.warning("cannot store a malformed message as a dead letter: %s", error)

    task = asyncio.create_task(store())
    pending.add(task)
    task.add_done_callback(pending.discard)
