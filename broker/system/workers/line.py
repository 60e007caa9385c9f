"""Frames between a process and its worker processes over a socket pair.

A frame is a length, four bytes little-endian, and that many bytes of a MessagePack message, never a
pickle. Long frames of a worker are refused unread, because it runs users' code.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from io import BufferedReader
from typing import Final

from broker.errors import RlearnerError

HEADER: Final = struct.Struct("<I")
MAX_ANSWER_BYTES: Final = 8 << 20


class HungUp(RlearnerError):
    """The other end closed the socket."""


class ProtocolError(RlearnerError):
    """The response is not one that a worker sends."""


def frame(data: bytes) -> bytes:
    """Return the bytes with their length in front."""
    return HEADER.pack(len(data)) + data


def read(stream: BufferedReader) -> bytes | None:
    """In a worker: read the next request, None once the hub has closed the socket."""
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    (size,) = HEADER.unpack(header)
    return stream.read(size)


def write(connection: socket.socket, data: bytes) -> bool:
    """In a worker: send a response; return False once the hub has closed the socket."""
    try:
        connection.sendall(frame(data))
    except (BrokenPipeError, ConnectionResetError):
        return False
    return True


def said(error: BaseException) -> str:
    """Return the text of a user's exception in one line that can be sent."""
    try:
        return clean(str(error))
    except Exception as second:  # noqa: BLE001 - its __str__ fails
        return f"(and cannot say what, {type(second).__name__})"


def clean(text: str, limit: int = 500) -> str:
    """Return one line of at most ``limit`` characters of valid Unicode."""
    return " ".join(text[: 4 * limit].split())[:limit].encode("utf-8", "replace").decode()


class WorkerSocket:
    """The hub's side of the socket to one worker."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, ours: socket.socket) -> WorkerSocket:
        """Take one end of a socket pair."""
        return cls(*await asyncio.open_unix_connection(sock=ours))

    async def ask(self, question: bytes) -> bytes:
        """Send a request and return its response; after a cancelled request the socket is unusable.

        Raises:
            HungUp: if the other end is closed.
            ProtocolError: if the response is larger than MAX_ANSWER_BYTES.
        """
        try:
            self._writer.write(frame(question))
            await self._writer.drain()
            (size,) = HEADER.unpack(await self._reader.readexactly(HEADER.size))
            if size > MAX_ANSWER_BYTES:
                raise ProtocolError(f"{size} bytes, the limit is {MAX_ANSWER_BYTES}")
            return await self._reader.readexactly(size)
        except (asyncio.IncompleteReadError, ConnectionError):
            raise HungUp("the other end closed") from None

    def close(self) -> None:
        self._writer.close()
