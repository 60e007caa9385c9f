"""Talks to an MCP server over its stdin and stdout: a message per line, of bounded length.

The package's own transport reads lines of any length.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

import anyio
from mcp.client import Transport
from mcp.shared.message import SessionMessage
from mcp_types import INTERNAL_ERROR, ErrorData, JSONRPCError, jsonrpc_message_adapter

from envhub.envs.tool_sources.base import MAX_MESSAGE_BYTES
from envhub.envs.tool_sources.process import CHUNK_BYTES, GuardedProcess

# the id of an answer stands before or behind the result
_ID: Final = re.compile(rb'\A\{\s*(?:"jsonrpc"\s*:\s*"2\.0"\s*,\s*)?"id"\s*:\s*(\d{1,15})\s*,')
_LAST_ID: Final = re.compile(
    rb',\s*"id"\s*:\s*(\d{1,15})\s*(?:,\s*"jsonrpc"\s*:\s*"2\.0"\s*)?\}\s*\Z'
)
_KEPT: Final = 256


@asynccontextmanager
async def stdio_transport(process: GuardedProcess) -> AsyncGenerator[Any, None]:
    """Yield the streams of a connection, as the package's transports do."""
    incoming, read_stream = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    write_stream, outgoing = anyio.create_memory_object_stream[SessionMessage](0)

    async def read() -> None:
        async with incoming:
            # the session may have ended
            with suppress(anyio.ClosedResourceError, anyio.BrokenResourceError):
                async for line in bounded_lines(process.reader):
                    if line.strip():
                        await incoming.send(parse_line(line))

    async def write() -> None:
        async with outgoing:
            # a server that is gone shows on the other stream
            with suppress(ConnectionError):
                async for message in outgoing:
                    text = message.message.model_dump_json(by_alias=True, exclude_unset=True)
                    process.writer.write(text.encode() + b"\n")
                    await process.writer.drain()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(read)
        tasks.start_soon(write)
        try:
            yield read_stream, write_stream
        finally:
            read_stream.close()
            write_stream.close()
            tasks.cancel_scope.cancel()


class LongLine:
    """The two ends of a line that is too long."""

    def __init__(self, start: bytes, end: bytes) -> None:
        self.start = start
        self.end = end


async def bounded_lines(
    reader: asyncio.StreamReader, limit: int = MAX_MESSAGE_BYTES
) -> AsyncIterator[bytes]:
    """Yield lines; of one that is too long, an error in its place, or nothing without its id."""
    pending: list[bytes] = []
    size = 0
    start = b""
    while data := await reader.read(CHUNK_BYTES):
        *lines, rest = data.split(b"\n")
        for end in lines:
            if size + len(end) <= limit:
                yield b"".join([*pending, end])
            else:
                tail = (pending[-1] + end)[-_KEPT:] if pending else end[-_KEPT:]
                if answer := too_long(start or b"".join(pending)[:_KEPT], tail, limit):
                    yield answer
            pending.clear()
            size = 0
            start = b""
        size += len(rest)
        pending.append(rest)
        if size > limit:
            # only its two ends are kept
            start = start or b"".join(pending)[:_KEPT]
            pending = [b"".join(pending[-2:])[-_KEPT:]]


def too_long(start: bytes, end: bytes, limit: int) -> bytes:
    """Return an error in the place of an answer that is too long; empty if its id is not known."""
    match = _ID.search(start) or _LAST_ID.search(end)
    if match is None:
        return b""
    message = f"the answer is larger than {limit} bytes"
    error = JSONRPCError(
        jsonrpc="2.0",
        id=int(match[1]),
        error=ErrorData(code=INTERNAL_ERROR, message=message),
    )
    return error.model_dump_json(by_alias=True, exclude_unset=True).encode()


def parse_line(line: bytes) -> SessionMessage | Exception:
    """Return a message, or as a value why the line is none."""
    try:
        return SessionMessage(jsonrpc_message_adapter.validate_json(line, by_name=False))
    except ValueError as error:
        return error


__all__ = ["Transport", "bounded_lines", "parse_line", "stdio_transport", "too_long"]
