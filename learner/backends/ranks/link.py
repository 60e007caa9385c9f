"""A socket between rank 0 and one other rank; frames are a length and that many bytes of msgpack."""

from __future__ import annotations

import socket
import struct
import time
from typing import Any, Final

import msgspec

from learner.backends.ranks.messages import Command, Reply

_HEADER: Final = struct.Struct("<Q")


class LinkClosedError(Exception):
    """The process at the other end has ended."""


class RankLink:
    """One end of the socket."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._command, self._reply = msgspec.msgpack.Decoder(Command), msgspec.msgpack.Decoder(Reply)

    def send(self, message: Any) -> None:
        """Send a message.

        Raises:
            LinkClosedError: if the other end has closed.
        """
        body = msgspec.msgpack.encode(message)
        try:
            self._socket.sendall(_HEADER.pack(len(body)) + body)
        except OSError as error:
            raise LinkClosedError(str(error)) from None

    def command(self) -> Command:
        """Wait for the next command; raises ``LinkClosedError`` if the other end has closed."""
        found: Command = self._command.decode(self._frame())
        return found

    def reply(self) -> Reply:
        """Wait for the next reply; raises ``LinkClosedError`` if the other end has closed."""
        found: Reply = self._reply.decode(self._frame())
        return found

    def closes(self, seconds: float) -> bool:
        """Return whether the other end closes in time; drop everything that it still sends."""
        deadline = time.monotonic() + seconds
        try:
            while (left := deadline - time.monotonic()) > 0:
                self._socket.settimeout(left)
                if not self._socket.recv(1 << 20):
                    return True
        except TimeoutError:
            return False
        except OSError:
            return True
        return False

    def close(self) -> None:
        self._socket.close()

    def _frame(self) -> bytes:
        (size,) = _HEADER.unpack(self._exactly(_HEADER.size))
        return self._exactly(size)

    def _exactly(self, size: int) -> bytes:
        parts, missing = [], size
        while missing:
            try:
                part = self._socket.recv(min(missing, 1 << 20))
            except OSError as error:
                raise LinkClosedError(str(error)) from None
            if not part:
                raise LinkClosedError("the other end has closed")
            parts.append(part)
            missing -= len(part)
        return b"".join(parts)
