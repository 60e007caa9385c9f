"""The link of rank 0 and one other rank: msgpack messages over a socket, or over CURVE."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections import deque
from typing import Any, Final, Protocol

import msgspec

from learner.backends.ranks.messages import Command, Reply, WrittenReply

_HEADER: Final = struct.Struct("<Q")
_encoder: Final = msgspec.msgpack.Encoder()
_commands: Final = msgspec.msgpack.Decoder(Command)
_replies: Final = msgspec.msgpack.Decoder(Reply)


class LinkClosedError(Exception):
    """The process at the other end has ended."""


class Frames(Protocol):
    """Carries frames between two processes.

    Its methods raise ``LinkClosedError`` if the other end has closed.
    """

    def put(self, frame: bytes) -> None:
        """Send a frame."""
        ...

    def take(self) -> bytes:
        """Wait for the next frame."""
        ...

    def closes(self, seconds: float) -> bool:
        """Return whether the other end closes in time; drop everything that it still sends."""
        ...

    def close(self) -> None:
        """Close this end."""
        ...


class RankLink:
    """One end of a connection, for two threads: one trains, one writes a checkpoint.

    Its methods raise ``LinkClosedError`` if the other end has closed.
    """

    def __init__(self, frames: Frames) -> None:
        self._frames = frames
        # Two threads send: one trains, the other writes a checkpoint.
        self._sending = threading.Lock()
        self.closes = frames.closes
        self.close = frames.close
        # A thread that has read a reply for the other one wakes it.
        self._arrived = threading.Condition()
        self._reading = False
        # The thread that writes a checkpoint waits for the first kind, the other for the second.
        self._written_replies = deque[Reply]()
        self._other_replies = deque[Reply]()

    def send(self, message: Any) -> None:
        """Send a command or a reply."""
        with self._sending:
            self._frames.put(_encoder.encode(message))

    def receive_command(self) -> Command:
        """Wait for the next command."""
        command: Command = _commands.decode(self._frames.take())
        return command

    def receive_reply(self) -> Reply:
        """Wait for the next reply, except ``WrittenReply``."""
        return self._next(self._other_replies)

    def receive_written(self) -> WrittenReply:
        """Wait for the next ``WrittenReply``."""
        reply = self._next(self._written_replies)
        assert isinstance(reply, WrittenReply)
        return reply

    def _next(self, queue: deque[Reply]) -> Reply:
        """Return the first of the wanted replies; one thread reads for both kinds."""
        while True:
            with self._arrived:
                self._arrived.wait_for(lambda: queue or not self._reading)
                if queue:
                    return queue.popleft()
                self._reading = True
            try:
                reply: Reply = _replies.decode(self._frames.take())
                if isinstance(reply, WrittenReply):
                    self._written_replies.append(reply)
                else:
                    self._other_replies.append(reply)
            finally:
                with self._arrived:
                    self._reading = False
                    self._arrived.notify_all()


class SocketFrames:
    """Frames over a stream socket of one host: a length and that many bytes."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end

    def put(self, frame: bytes) -> None:
        try:
            self._socket.sendall(_HEADER.pack(len(frame)) + frame)
        except OSError as error:
            raise LinkClosedError(str(error)) from None

    def take(self) -> bytes:
        (size,) = _HEADER.unpack(self._exactly(_HEADER.size))
        return self._exactly(size)

    def closes(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        try:
            while (remaining := deadline - time.monotonic()) > 0:
                self._socket.settimeout(remaining)
                if not self._socket.recv(1 << 20):
                    return True
        except TimeoutError:
            return False
        except OSError:
            return True
        return False

    def close(self) -> None:
        self._socket.close()

    def _exactly(self, size: int) -> bytes:
        parts = []
        missing = size
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
