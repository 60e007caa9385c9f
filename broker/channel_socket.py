"""A plain ZeroMQ socket on the running event loop: calls back with what arrives, and sends in batches.

Reading: the loop watches the socket's file descriptor, which is edge-triggered. It tells that something happened, not that
something is there, and sending may take the news off it. So whoever sent looks once more, and looking goes on until there
is nothing left. Against ``zmq.asyncio`` this saves a future, a task step and a timer for every message.

Sending: a message that finds ZeroMQ's own thread asleep has to wake it, which costs more than all the rest of sending. So
messages wait for the end of the loop's turn, or for some more of them, and leave together.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Any, Final

import zmq

log = logging.getLogger(__name__)

DONTWAIT: Final = int(zmq.DONTWAIT)  # as plain integers: an enumeration's operators cost as much as the sending
MORE: Final = int(zmq.DONTWAIT | zmq.SNDMORE)
READ_AT_ONCE: Final = 1000  # messages, before others get their turn on the loop
SEND_AT: Final = 32  # messages that do not wait for the end of the loop's turn: it may be some milliseconds away

Frames = list[bytes]


class LoopSocket:
    """One socket; all calls from the event loop's thread.

    Args:
        socket: owned from now on.
        receive: called with the frames of every message; must not raise.
    """

    def __init__(self, socket: zmq.Socket[bytes], receive: Callable[[Frames], None]) -> None:
        self._socket, self._receive = socket, receive
        self._loop = asyncio.get_running_loop()
        self._unsent: deque[tuple[Frames, asyncio.Future[Any] | None]] = deque()
        self._blocked = False  # nobody was there to send to
        self._look: asyncio.Handle | None = None  # news are to be looked at, though the file descriptor tells of none
        self._fd = int(socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self._on_news)
        self._look_again()

    def post(self, frames: Frames, asker: asyncio.Future[Any] | None = None) -> None:
        """Send soon, in the order of the calls; when nobody is there to send to, once somebody is.

        Args:
            frames: of the message.
            asker: the message is not sent any more once this is done.
        """
        self._unsent.append((frames, asker))
        if len(self._unsent) >= SEND_AT and not self._blocked:
            self._flush()
        self._look_again()

    def read_all(self) -> None:
        """Call back with everything that has arrived by now."""
        while self._read():
            pass

    def close(self) -> None:
        """Call back no more; what can be sent leaves within the linger time."""
        if self._socket.closed:
            return
        self._flush()
        self._unsent.clear()
        self._loop.remove_reader(self._fd)
        if self._look is not None:
            self._look.cancel()
            self._look = None
        self._socket.close()

    def _look_again(self) -> None:
        if self._look is None:
            self._look = self._loop.call_soon(self._on_news)

    def _on_news(self) -> None:
        if self._look is not None:
            self._look.cancel()
            self._look = None
        self._flush()
        more = self._read()
        if self._blocked and not self._socket.closed:  # either of the two may have taken the news of the other off
            events = int(self._socket.get(zmq.EVENTS))
            more = more or bool(events & (zmq.POLLIN | zmq.POLLOUT))
        if more:
            self._look_again()

    def _flush(self) -> None:
        unsent, self._blocked = self._unsent, False
        while unsent:
            frames, asker = unsent[0]
            if asker is None or not asker.done():
                try:
                    self._send(frames)
                except zmq.Again:
                    self._blocked = True
                    return
                except zmq.ZMQError as error:
                    log.error("a message could not be sent: %s", error)
            unsent.popleft()

    def _send(self, frames: Frames) -> None:
        """(A message is taken whole or, at its first frame, not at all.)"""
        socket = self._socket
        for frame in frames[:-1]:
            socket.send(frame, MORE)
        socket.send(frames[-1], DONTWAIT)

    def _read(self) -> bool:
        """Read messages; whether there may be more."""
        socket: Any = self._socket
        for _ in range(READ_AT_ONCE):
            if socket.closed:  # by whoever was called back
                return False
            try:
                frames = socket.recv_multipart(DONTWAIT)
            except zmq.Again:
                return False
            self._receive(frames)
        return True
