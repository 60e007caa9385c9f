"""A thread that owns ZeroMQ sockets: reads them, and does what other threads have prepared."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final

import zmq

LONGEST_S: Final = 1.0  # between two turns
CLOSE_S: Final = 2.0

log = logging.getLogger(__name__)


class SocketThread:
    """Polls sockets until it is closed; closes them then.

    Args:
        name: of the thread.
        sockets: and what reads each of them; used only in this thread once it runs.
        turn: called after each poll; returns the seconds after which it must be called again, None
            for any time.
        end: called last.
    """

    def __init__(
        self,
        name: str,
        sockets: Mapping[zmq.Socket[bytes], Callable[[], None]],
        turn: Callable[[], float | None],
        end: Callable[[], None],
    ) -> None:
        self._sockets = dict(sockets)
        self._turn = turn
        self._end = end
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def poke(self) -> None:
        """Have ``turn`` called soon; from any thread."""
        with self._lock:
            if self._wake >= 0:
                with suppress(BlockingIOError):
                    os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """End the thread and wait for it, but only briefly."""
        self._closing = True
        self.poke()
        if threading.current_thread() is not self._thread:
            self._thread.join(CLOSE_S)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake, zmq.POLLIN)
        for socket in self._sockets:
            poller.register(socket, zmq.POLLIN)
        wait_s: float | None = 0.0
        while not self._closing:
            try:
                ready: dict[Any, int] = dict(
                    poller.poll(
                        int(1000 * min(LONGEST_S, LONGEST_S if wait_s is None else wait_s)) + 1
                    )
                )
                if self._wake in ready:
                    os.eventfd_read(self._wake)
                for socket, read in self._sockets.items():
                    if socket in ready:
                        read()
                wait_s = self._turn()
            except Exception:  # one bad message must not end the service of all others
                log.exception("weights: a request at the rendezvous failed")
        for socket in self._sockets:
            socket.close(linger=0)
        with self._lock:
            os.close(self._wake)
            self._wake = -1
        self._end()
