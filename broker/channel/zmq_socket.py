"""A plain ZeroMQ socket on the running event loop: calls back with what arrives, and sends in batches.

Reading: the loop watches the socket's file descriptor, which is edge-triggered. It tells that something happened, not
that something is there, and sending may take the news off it. So a sender looks once more after sending, and looking
continues until there is nothing left. Against ``zmq.asyncio`` this saves a future, a task step and a timer for every
message.

Sending: a message that finds ZeroMQ's own thread asleep has to wake it, which costs more than all the rest of sending,
as at the other end. So messages wait for the end of the loop's turn, or for some more of them, and leave together, in
one bundle for each peer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Final

import zmq

from broker.channel.bundle import Entry, cut, pack

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
        self._unsent: dict[bytes, list[tuple[Entry, asyncio.Future[Any] | None]]] = {}  # by route
        self._num_unsent = 0  # since the last attempt to send
        self._blocked = False  # nobody was there to send to
        self._look: asyncio.Handle | None = None  # news are to be looked at, though the file descriptor tells of none
        self._fd = int(socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self._on_news)
        self._look_again()

    def post(self, route: bytes, token: str, data: bytes, asker: asyncio.Future[Any] | None = None) -> None:
        """Send soon, in the order of the calls; when nobody is there to send to, once somebody is.

        Args:
            route: which of the socket's peers to send to; empty where it has one only.
            token: goes with the message.
            data: the message.
            asker: the message is not sent any more once this is done.
        """
        entry = ((token, data), asker)
        if route in self._unsent:
            self._unsent[route].append(entry)
        else:
            self._unsent[route] = [entry]
        self._num_unsent += 1
        if self._num_unsent >= SEND_AT and not self._blocked:
            self._flush()
        if self._look is None:
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
        self._blocked, self._num_unsent = False, 0
        while self._unsent:
            route, waiting = next(iter(self._unsent.items()))
            wanted = [entry for entry, asker in waiting if asker is None or not asker.done()]
            num_sent = 0
            for bundle in cut(wanted):
                try:
                    self._send(route, pack(bundle))
                except zmq.Again:
                    self._blocked = True
                    self._unsent[route] = [one for one in waiting if one[1] is None or not one[1].done()][num_sent:]
                    return
                except zmq.ZMQError as error:
                    log.error("%d messages could not be sent: %s", len(bundle), error)
                num_sent += len(bundle)
            del self._unsent[route]

    def _send(self, route: bytes, data: bytes) -> None:
        """(A message is taken whole or, at its first frame, not at all.)"""
        if route:
            self._socket.send(route, MORE)
        self._socket.send(data, DONTWAIT)

    def _read(self) -> bool:
        """Read messages; whether there may be more."""
        socket: Any = self._socket
        for _ in range(READ_AT_ONCE):
            if socket.closed:  # by the callback
                return False
            try:
                frames = socket.recv_multipart(DONTWAIT)
            except zmq.Again:
                return False
            self._receive(frames)
        return True
