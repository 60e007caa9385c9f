"""Messages that the broker passes on without storing them: metrics, requests and replies."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Final, TypeVar

import msgspec

from broker.contract import codec, wire
from broker.contract.streams import METRICS, Stream
from broker.errors import RequestFailed, RequestInvalid, TooLarge, WireError
from broker.jetstream.bus import Bus
from broker.jetstream.delivery import decode_message
from broker.nats.client import Msg
from broker.nats.nats_errors import Disconnected, NoResponders
from broker.nats.subscription import LinkSubscription

log = logging.getLogger(__name__)

MAX_WAITING_METRICS: Final = 2048

M = TypeVar("M", bound=wire.Message)

Handler = Callable[[wire.Message], Awaitable[wire.Message | None]]


async def publish_metrics(bus: Bus, metrics: wire.Metrics) -> None:
    """Publish metrics, without those that are not finite; lost if disconnected or if nothing
    listens.
    """
    finite = {name: value for name, value in metrics.values.items() if math.isfinite(value)}
    subject = METRICS.subject(bus.run, f"{metrics.role}.{metrics.id}")
    try:
        await bus.link.send(subject, codec.encode(msgspec.structs.replace(metrics, values=finite)))
    except Disconnected:
        log.debug("metrics not sent")


async def watch_metrics(bus: Bus, role: str = "") -> AsyncGenerator[wire.Metrics, None]:
    """Yield the metrics of every process of the run, or of one role; a reader that is too slow
    misses the oldest.
    """
    waiting: deque[Msg] = deque(maxlen=MAX_WAITING_METRICS)
    arrived = asyncio.Event()

    async def receive(message: Msg) -> None:
        waiting.append(message)
        arrived.set()

    subscribed = await bus.link.subscribe(METRICS.all_subjects(bus.run, role), receive)
    try:
        while True:
            await arrived.wait()
            arrived.clear()
            while waiting:
                message = waiting.popleft()
                decoded, error = decode_message(message.data, METRICS.messages)
                if isinstance(decoded, wire.Metrics):
                    yield decoded
                else:
                    await bus.dead_letter(METRICS, seq=0, ticket=0, reason=error, data=message.data)
    finally:
        await subscribed.close()


async def send_request(
    bus: Bus,
    stream: Stream,
    key: str,
    message: wire.Message,
    *,
    timeout_s: float,
    reply: type[M] | tuple[type[M], ...],
) -> M:
    """Send a request to the responder of that key; return its reply, of a type in ``reply``.

    Raises:
        RequestFailed: if nothing listens, or the reply is late.
        RequestInvalid: if the request is not valid or too large, or the reply does not decode.
    """
    subject = stream.subject(bus.run, key)
    try:
        data = codec.encode(message)
        if len(data) > (limit := bus.link.max_payload):
            raise TooLarge(
                f"{type(message).__name__} is {len(data)} bytes, the broker's limit is {limit}"
            )
        answer = await bus.link.call(subject, data, timeout_s=timeout_s)
        return codec.decode(answer.data, *(reply if isinstance(reply, tuple) else (reply,)))
    except NoResponders:
        raise RequestFailed(f"{subject}: nothing listens") from None
    except TimeoutError:
        raise RequestFailed(f"{subject}: no answer within {timeout_s:g} s") from None
    except Disconnected as error:
        raise RequestFailed(f"{subject}: {error}") from None
    except WireError as error:
        raise RequestInvalid(f"{subject}: {error}") from None


async def answer_requests(
    bus: Bus, stream: Stream, key: str, handle: Handler, *, shared: bool = False
) -> LinkSubscription:
    """Answer requests, each in its own task, until the returned subscription is closed.

    A handler that returns None sends no reply. A request that does not decode becomes a dead letter
    and times out.

    Args:
        shared: whether each request goes to one of all processes that answer those of this key,
            instead of to all.
    """
    tasks: set[asyncio.Task[None]] = set()

    async def answer(request: Msg) -> None:
        message, error = decode_message(request.data, stream.messages)
        if message is None:
            await bus.dead_letter(stream, seq=0, ticket=0, reason=error, data=request.data)
            return
        reply = await handle(message)
        if reply is not None and request.reply:
            try:
                await bus.link.send(request.reply, codec.encode(reply))
            except Disconnected:
                log.debug("%s: not connected, reply lost; the requester retries", stream.name)

    async def receive(request: Msg) -> None:
        task = asyncio.create_task(answer(request))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    return await bus.link.subscribe(
        stream.subject(bus.run, key), receive, queue=stream.name if shared else ""
    )
