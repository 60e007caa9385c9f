"""What a hub and its worker processes say to each other: frames over a socket pair, one question and one answer at a
time.

A frame is a length, four bytes little-endian, and as many bytes; each role has its own MessagePack messages in them,
never a pickle. What a worker sends is refused unread beyond a limit: it runs code of the user's.
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
    """The other end closed; what became of its process is still to be found out."""


class ProtocolError(RlearnerError):
    """The other end answered what no worker answers."""


def frame(data: bytes) -> bytes:
    """The bytes with their length in front."""
    return HEADER.pack(len(data)) + data


def read(stream: BufferedReader) -> bytes | None:
    """The worker's side: the next question, None once the hub has hung up."""
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    (size,) = HEADER.unpack(header)
    return stream.read(size)


def write(connection: socket.socket, data: bytes) -> bool:
    """The worker's side: send an answer; False once the hub has hung up, for example on a worker that took too long."""
    try:
        connection.sendall(frame(data))
    except (BrokenPipeError, ConnectionResetError):
        return False
    return True


def said(error: BaseException) -> str:
    """What an exception of the user's says, in one line that can be sent."""
    try:
        return clean(str(error))
    except Exception as second:  # noqa: BLE001 - it cannot even say what it is
        return f"(and cannot say what, {type(second).__name__})"


def clean(text: str, limit: int = 500) -> str:
    """One line of at most ``limit`` characters, valid Unicode."""
    return " ".join(text[: 4 * limit].split())[:limit].encode("utf-8", "replace").decode()


class WorkerSocket:
    """The hub's side of the socket to one worker."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def open(cls, ours: socket.socket) -> WorkerSocket:
        """Take over one end of a socket pair."""
        return cls(*await asyncio.open_unix_connection(sock=ours))

    async def ask(self, question: bytes) -> bytes:
        """One question, one answer. A question that is cancelled makes the line unusable.

        Raises:
            HungUp: the other end is closed.
            ProtocolError: the answer is larger than MAX_ANSWER_BYTES.
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
        """Hang up."""
        self._writer.close()
