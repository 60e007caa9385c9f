"""A socket between rank 0 and one other rank; frames are a length and that many bytes of msgpack."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections import deque
from typing import Any, Final

import msgspec

from learner.backends.ranks.messages import Command, Reply, WrittenReply

_HEADER: Final = struct.Struct("<Q")


class LinkClosedError(Exception):
    """The process at the other end has ended."""


class RankLink:
    """One end of the socket; a thread that writes a checkpoint may use it next to the one that trains."""

    def __init__(self, end: socket.socket) -> None:
        self._socket, self._sending = end, threading.Lock()
        self._arrived, self._reading = threading.Condition(), False
        self._written, self._others = deque[Reply](), deque[Reply]()
        self._command, self._reply = msgspec.msgpack.Decoder(Command), msgspec.msgpack.Decoder(Reply)

    def send(self, message: Any) -> None:
        """Send a message.

        Raises:
            LinkClosedError: if the other end has closed.
        """
        body = msgspec.msgpack.encode(message)
        try:
            with self._sending:
                self._socket.sendall(_HEADER.pack(len(body)) + body)
        except OSError as error:
            raise LinkClosedError(str(error)) from None

    def command(self) -> Command:
        """Wait for the next command; raises ``LinkClosedError`` if the other end has closed."""
        found: Command = self._command.decode(self._frame())
        return found

    def reply(self) -> Reply:
        """Wait for the next reply, except ``WrittenReply``; raises ``LinkClosedError`` if the other end has closed."""
        return self._next(self._others)

    def written(self) -> WrittenReply:
        """Wait for the next ``WrittenReply``; raises ``LinkClosedError`` if the other end has closed."""
        found = self._next(self._written)
        assert isinstance(found, WrittenReply)
        return found

    def _next(self, wanted: deque[Reply]) -> Reply:
        """Return the first of the wanted replies; one thread reads for both kinds."""
        while True:
            with self._arrived:
                self._arrived.wait_for(lambda: wanted or not self._reading)
                if wanted:
                    return wanted.popleft()
                self._reading = True
            try:
                found: Reply = self._reply.decode(self._frame())
                (self._written if isinstance(found, WrittenReply) else self._others).append(found)
            finally:
                with self._arrived:
                    self._reading = False
                    self._arrived.notify_all()

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
