"""Numbered calls of a parent and the answers of its worker, and the worker's side of them.

The content of a call is encoded by who makes it, so that this kit does not know it.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Any, Final

import msgspec
from msgspec.msgpack import Decoder, Encoder

from rlearner_workers import frames
from rlearner_workers.link import MessageLink


class WorkerCall(msgspec.Struct, frozen=True, tag=True):
    """A call; answered by CallAnswer with the same number."""

    number: int
    content: msgspec.Raw


class CancelCall(msgspec.Struct, frozen=True, tag=True):
    """Nobody waits for the answer any more; no answer is expected."""

    number: int


class CallAnswer(msgspec.Struct, frozen=True):
    """The answer to a call."""

    number: int
    content: msgspec.Raw
    is_spent: bool = False  # the worker has used much of its memory and should be replaced


ENCODER: Final = Encoder()
CALLS: Final[Decoder[WorkerCall | CancelCall]] = Decoder(WorkerCall | CancelCall)
ANSWERS: Final[Decoder[CallAnswer]] = Decoder(CallAnswer)


def pack_content(message: msgspec.Struct) -> msgspec.Raw:
    """Return a message as the content of a call or an answer."""
    return msgspec.Raw(ENCODER.encode(message))


def serve_calls(
    connection: socket.socket, answer: Callable[[msgspec.Raw], tuple[msgspec.Struct, bool]]
) -> None:
    """In a worker: answer calls one after the other until the parent closes the connection.

    Args:
        answer: returns the answer to a call's content, and whether this process is spent.
    """
    while (data := frames.read_frame(connection.fileno())) is not None:
        try:
            call = CALLS.decode(data)
        except msgspec.DecodeError:
            return
        if isinstance(call, CancelCall):
            continue  # answered already
        content, is_spent = answer(call.content)
        reply = CallAnswer(call.number, pack_content(content), is_spent)
        if not frames.write_frame(connection.fileno(), ENCODER.encode(reply)):
            return


async def serve_concurrent_calls(
    connection: socket.socket, answer: Callable[[msgspec.Raw], Awaitable[msgspec.Struct]]
) -> None:
    """In a worker: answer calls in any order until the parent closes the connection."""
    link: MessageLink[Any] = await MessageLink.open(connection, CALLS)
    tasks: dict[int, asyncio.Task[None]] = {}

    async def work(call: WorkerCall) -> None:
        try:
            link.send(CallAnswer(call.number, pack_content(await answer(call.content))))
            await link.drain()
        finally:
            del tasks[call.number]

    while (message := await link.receive_or_none()) is not None:
        if isinstance(message, WorkerCall):
            tasks[message.number] = asyncio.create_task(work(message))
        elif (task := tasks.get(message.number)) is not None:
            task.cancel()
