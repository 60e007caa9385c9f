"""A plain ZeroMQ socket on the running event loop: calls back with what arrives, sends at once or queues.

The loop watches the socket's file descriptor, which is edge-triggered: it tells that something happened, not that
something is there, and sending may take the news off it. So whoever sent looks once more, and looking goes on until
there is nothing left. Against ``zmq.asyncio`` this saves a future, a task step and a timer for every message.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, Final

import zmq

DONTWAIT: Final = int(zmq.DONTWAIT)  # as plain integers: the enumerations are rebuilt at every use
MORE: Final = int(zmq.DONTWAIT | zmq.SNDMORE)
MOST_AT_ONCE: Final = 1000  # messages read before others get their turn on the loop

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
        self._unsent: deque[tuple[Frames, asyncio.Future[None]]] = deque()
        self._look: asyncio.Handle | None = None  # one more look is due
        self._fd = int(socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self._on_news)
        self._look_again()

    def send_now(self, frames: Frames) -> bool:
        """Send; False when that would have to wait.

        Raises:
            zmq.ZMQError: it cannot be sent.
        """
        if self._unsent:
            return False
        self._look_again()
        return self._try(frames)

    async def send(self, frames: Frames) -> None:
        """Send, waiting for as long as there is nobody to send to.

        Raises:
            zmq.ZMQError: it cannot be sent.
        """
        if self.send_now(frames):
            return
        future: asyncio.Future[None] = self._loop.create_future()
        self._unsent.append((frames, future))
        await future

    def read_all(self) -> None:
        """Call back with everything that has arrived by now."""
        while self._read(MOST_AT_ONCE):
            pass

    def close(self) -> None:
        """Call back no more; what was sent leaves within the linger time, what still waited does not."""
        if self._socket.closed:
            return
        self._loop.remove_reader(self._fd)
        if self._look is not None:
            self._look.cancel()
            self._look = None
        while self._unsent:
            _, future = self._unsent.popleft()
            if not future.done():
                future.set_exception(zmq.ZMQError(zmq.ETERM, "the connection was closed"))
        self._socket.close()

    def _try(self, frames: Frames) -> bool:
        """(A message is taken whole or, at its first frame, not at all.)"""
        socket = self._socket
        try:
            for frame in frames[:-1]:
                socket.send(frame, MORE)
            socket.send(frames[-1], DONTWAIT)
        except zmq.Again:
            return False
        return True

    def _look_again(self) -> None:
        if self._look is None:
            self._look = self._loop.call_soon(self._on_news)

    def _on_news(self) -> None:
        if self._look is not None:
            self._look.cancel()
            self._look = None
        more = self._read(MOST_AT_ONCE)
        if self._unsent:
            self._flush()
            events = int(self._socket.get(zmq.EVENTS))  # either of the two may have taken the news of the other off
            more = more or bool(events & zmq.POLLIN) or bool(self._unsent and events & zmq.POLLOUT)
        if more:
            self._look_again()

    def _flush(self) -> None:
        while self._unsent:
            frames, future = self._unsent[0]
            if not future.done():  # else whoever wanted it sent has given up
                try:
                    if not self._try(frames):
                        return
                except zmq.ZMQError as error:
                    future.set_exception(error)
                else:
                    future.set_result(None)
            self._unsent.popleft()

    def _read(self, most: int) -> bool:
        """Read messages; whether there may be more."""
        socket: Any = self._socket
        for _ in range(most):
            if socket.closed:  # by whoever was called back
                return False
            try:
                frames = socket.recv_multipart(DONTWAIT)
            except zmq.Again:
                return False
            self._receive(frames)
        return True
