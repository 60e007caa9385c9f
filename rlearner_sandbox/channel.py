"""Requests and responses between a program and its tests, over a socket. Runs inside, at both ends.

A frame holds JSON. Either end may send a request while the other waits for a response: a test calls
a function of the program, which calls a function of the test.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from rlearner_workers.frames import FrameTooLong, read_frame, write_frame

MOST_BYTES = 32 << 20  # of a frame
ASK = "ask"


class TooMuch(ValueError):
    """Raised when a message is larger than a frame may be."""


class Channel:
    """One end of the socket ``fd``.

    Args:
        obey: answers a question and raises nothing; called again with the error if its answer was
            too large.
        hung_up: called when the other end is closed or sends an invalid frame; does not return.
    """

    def __init__(self, fd: int, obey: Callable[[Any], Any], hung_up: Callable[[], Any]) -> None:
        self._fd = fd
        self._obey = obey
        self._hung_up = hung_up

    def ask(self, question: Any) -> Any:
        """Send a question and return the answer; raise TooMuch if the question is too large."""
        self._send([ASK, question])
        return self._wait()

    def serve(self) -> None:
        """Answer until the other end hangs up."""
        self._wait()
        # An answer that nobody asked for.
        self._hung_up()

    def _wait(self) -> Any:
        while True:
            kind, content = self._receive()
            if kind != ASK:
                return content
            try:
                self._send(["answer", self._obey(content)])
            except TooMuch as error:
                self._send(["answer", self._obey(error)])

    def _send(self, message: Any) -> None:
        data = json.dumps(message).encode("ascii")
        if len(data) > MOST_BYTES:
            raise TooMuch(f"{len(data)} bytes, and at most {MOST_BYTES} can be passed on")
        if not write_frame(self._fd, data):
            self._hung_up()

    def _receive(self) -> Any:
        try:
            # None if it is closed, which is no JSON
            kind, content = json.loads(read_frame(self._fd, MOST_BYTES) or b"")
        except (FrameTooLong, ValueError, TypeError, RecursionError):
            self._hung_up()
        return kind, content
