"""MessagePack messages over a socket that only two processes have, for an event loop."""

from __future__ import annotations

import asyncio
import socket
from typing import Final, Generic, TypeVar

import msgspec
from msgspec.msgpack import Decoder, Encoder

from broker.errors import RlearnerError
from rlearner_workers.frames import HEADER_BYTES, FrameTooLong, frame_size, pack_frame

_ENCODER: Final = Encoder()

Incoming = TypeVar("Incoming")


class LinkClosed(RlearnerError):
    """The other end closed the socket."""


class InvalidMessage(RlearnerError):
    """The other end sent something that is not a message, or too long."""


class MessageLink(Generic[Incoming]):
    """One end of the socket.

    Args:
        incoming: decodes what the other end sends.
        max_bytes: of one message that it sends; None: trusted.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        incoming: Decoder[Incoming],
        max_bytes: int | None = None,
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._incoming = incoming
        self._max_bytes = max_bytes
        self._is_ended = False

    @classmethod
    async def open(
        cls, end: socket.socket, incoming: Decoder[Incoming], max_bytes: int | None = None
    ) -> MessageLink[Incoming]:
        """Take one end of a socket pair."""
        return cls(*await asyncio.open_unix_connection(sock=end), incoming, max_bytes)

    def send(self, message: msgspec.Struct) -> None:
        """Send soon, in the order of the calls; nothing after ``end`` or ``close``."""
        if not self._is_ended:
            self._writer.write(pack_frame(_ENCODER.encode(message)))

    async def drain(self) -> None:
        """Wait while much is unsent.

        Raises:
            LinkClosed: if the other end has closed.
        """
        try:
            await self._writer.drain()
        except ConnectionError:
            raise LinkClosed("the other end closed") from None

    async def receive(self) -> Incoming:
        """Return the next message.

        Raises:
            LinkClosed: if the other end has closed.
            InvalidMessage: if it sends something else, or more than ``max_bytes``.
        """
        try:
            header = await self._reader.readexactly(HEADER_BYTES)
            size = frame_size(header, self._max_bytes)
            return self._incoming.decode(await self._reader.readexactly(size))
        except (asyncio.IncompleteReadError, ConnectionError):
            raise LinkClosed("the other end closed") from None
        except (FrameTooLong, msgspec.DecodeError) as error:
            raise InvalidMessage(str(error)) from None

    async def receive_or_none(self) -> Incoming | None:
        """Return the next message; None if ``receive`` would raise: nothing follows."""
        try:
            return await self.receive()
        except (LinkClosed, InvalidMessage):
            return None

    async def call(self, request: msgspec.Struct) -> Incoming:
        """Send a request and return the next message; unusable once that is cancelled.

        Raises:
            LinkClosed, InvalidMessage: as ``receive``.
        """
        self.send(request)
        await self.drain()
        return await self.receive()

    def end(self) -> None:
        """Send no more."""
        if not self._is_ended and self._writer.can_write_eof() and not self._writer.is_closing():
            self._writer.write_eof()
        self._is_ended = True

    def close(self) -> None:
        self._is_ended = True
        self._writer.close()
