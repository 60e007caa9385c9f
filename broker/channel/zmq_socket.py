"""A ZeroMQ socket on the running event loop that calls back with messages and sends them in
batches.

Reading: the socket's file descriptor, which the loop watches, is edge-triggered, and sending may
consume an event. So every event and every send is followed by reads until nothing is left. Compared
with ``zmq.asyncio`` this saves a future, a task step and a timer per message.

Sending: waking ZeroMQ's I/O thread costs more than the rest of sending, at both ends. So messages
wait for the end of the loop's turn, or until there are several, and are sent as one bundle per
peer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

import zmq

from broker.channel.bundle import Entry, cut_bundles, pack

log = logging.getLogger(__name__)

# plain integers: the operators of an enumeration cost as much as sending
DONTWAIT: Final = int(zmq.DONTWAIT)
MORE: Final = int(zmq.DONTWAIT | zmq.SNDMORE)
READ_AT_ONCE: Final = 1000  # messages, before other callbacks of the loop run
# messages that are sent before the end of the loop's turn, which may be milliseconds away
SEND_AT: Final = 32

Frames = list[bytes]


class LoopSocket:
    """One socket, used only from the event loop's thread.

    Args:
        socket: owned by this object.
        receive: called with the frames of every message; must not raise.
        copy: False: the frames are ``zmq.Frame`` objects, which tell who sent them.
    """

    def __init__(
        self, socket: zmq.Socket[bytes], receive: Callable[[Any], None], *, copy: bool = True
    ) -> None:
        self._socket = socket
        self._receive = receive
        self._copy = copy
        self._loop = asyncio.get_running_loop()
        self._unsent: dict[bytes, list[tuple[Entry, asyncio.Future[Any] | None]]] = {}  # by route
        self._num_unsent = 0  # since the last attempt to send
        self._blocked = False  # no peer was connected
        # a scheduled check for events that the file descriptor may not signal
        self._look: asyncio.Handle | None = None
        self._fd = int(socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self._on_news)
        self._look_again()

    def post(
        self, route: bytes, token: str, data: bytes, asker: asyncio.Future[Any] | None = None
    ) -> None:
        """Send soon, in the order of the calls, or when a peer connects.

        Args:
            route: which of the socket's peers to send to; empty if there is only one.
            asker: once this is done, the message is no longer sent.
        """
        self._unsent.setdefault(route, []).append(((token, data), asker))
        self._num_unsent += 1
        if self._num_unsent >= SEND_AT and not self._blocked:
            self._flush()
        if self._look is None:
            self._look_again()

    def send_raw(self, frames: Frames) -> None:
        """Send a message that is no bundle, at once; drop it if that is not possible."""
        with suppress(zmq.ZMQError):
            self._socket.send_multipart(frames, DONTWAIT)
        self._look_again()

    def read_all(self) -> None:
        """Call back with everything that has arrived."""
        while self._read():
            pass

    def close(self) -> None:
        """Stop calling back; unsent messages are sent within the linger time if possible."""
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
        # reading and sending may consume each other's events
        if self._blocked and not self._socket.closed:
            events = int(self._socket.get(zmq.EVENTS))
            more = more or bool(events & (zmq.POLLIN | zmq.POLLOUT))
        if more:
            self._look_again()

    def _flush(self) -> None:
        self._blocked = False
        self._num_unsent = 0
        while self._unsent:
            route, waiting = next(iter(self._unsent.items()))
            entries = [entry for entry, asker in waiting if asker is None or not asker.done()]
            num_sent = 0
            for bundle in cut_bundles(entries):
                try:
                    self._send(route, pack(bundle))
                except zmq.Again:
                    self._blocked = True
                    self._unsent[route] = [
                        (entry, asker)
                        for entry, asker in waiting
                        if asker is None or not asker.done()
                    ][num_sent:]
                    return
                except zmq.ZMQError as error:
                    log.error("%d messages could not be sent: %s", len(bundle), error)
                num_sent += len(bundle)
            del self._unsent[route]

    def _send(self, route: bytes, data: bytes) -> None:
        if route:
            self._socket.send(route, MORE)  # may raise Again; the frames that follow never do
        self._socket.send(data, DONTWAIT)

    def _read(self) -> bool:
        """Read messages; return whether there may be more."""
        socket: Any = self._socket
        for _ in range(READ_AT_ONCE):
            if socket.closed:  # by the callback
                return False
            try:
                frames = socket.recv_multipart(DONTWAIT, self._copy)
            except zmq.Again:
                return False
            self._receive(frames)
        return True
