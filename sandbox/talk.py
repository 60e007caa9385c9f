"""Talks to a program in the sandbox: hands it over, reads what it says, ends it in time.

The program and its tests go through a socket, each text with its length in front; answers come back as lines.
"""

from __future__ import annotations

import os
import secrets
import selectors
import socket
import subprocess
import time
from collections.abc import Iterable
from typing import Final

from broker.errors import RlearnerError
from broker.workers.limits import kill_tree
from sandbox.command import Limits, mend
from sandbox.ended import NO_PYTHON, Checks, Ended, KilledFor
from sandbox.memory import used_mib

START_S: Final = 20.0  # until the program begins
END_S: Final = 10.0  # until all its processes are gone once they have been killed
LOOK_EVERY_S: Final = 0.1


class SandboxFailed(RlearnerError):
    """The sandbox itself did not work this time; nothing is known about the program."""


class Talk:
    """One program while it runs; as a context, it leaves nothing of it behind.

    Args:
        child: the sandbox's process, with pipes for what it prints.
        control: our end of the socket to ``inside.py``.
        wall_s: how long the program may take.
    """

    def __init__(self, child: subprocess.Popen[bytes], control: socket.socket, limits: Limits, wall_s: float) -> None:
        self._child, self._control, self._limits, self._wall_s = child, control, limits, wall_s
        assert child.stdout is not None
        assert child.stderr is not None
        self._streams = {child.stdout.fileno(): bytearray(), child.stderr.fileno(): bytearray(), control.fileno(): bytearray()}
        self._pending = b""
        self._killed_for: KilledFor = ""
        self._token = secrets.token_hex(16)
        self._began: float | None = None
        self._looked = 0.0
        self._num_lines = 0

    def __enter__(self) -> Talk:
        return self

    def __exit__(self, *_: object) -> None:
        kill_tree(self._child.pid)
        self._child.wait()
        for stream in (self._child.stdout, self._child.stderr):
            if stream is not None:
                stream.close()

    def run(self, program: str, tests: Checks | None) -> Ended:
        """Run a program until it ends or has to.

        Raises:
            SandboxFailed: it did not begin, or its processes do not end.
        """
        self._pending = _frames([program])
        self._tests = tests
        deadline = time.monotonic() + START_S
        with selectors.DefaultSelector() as selector:
            for fd in self._streams:
                os.set_blocking(fd, False)
                if tests is not None or fd != self._control.fileno():
                    selector.register(fd, selectors.EVENT_READ)
            while selector.get_map():
                self._converse(selector)
                for key, events in selector.select(LOOK_EVERY_S):
                    self._serve(selector, key.fd, events)
                if self._began is not None and not self._killed_for:
                    deadline = self._began + self._wall_s
                if time.monotonic() > deadline:
                    if self._killed_for:
                        raise SandboxFailed("processes that were killed are still there")
                    deadline = self._kill("time")
                elif not self._killed_for and self._fat():
                    deadline = self._kill("memory")
                elif not self._killed_for and self._loud():
                    deadline = self._kill("output")
            self._converse(selector)
        return self._ended()

    def _converse(self, selector: selectors.BaseSelector) -> None:
        """Say what there is room for. What a script says is read in passing: to wake up for it would delay its start."""
        control = self._control.fileno()
        if control in selector.get_map():
            selector.modify(control, selectors.EVENT_READ | (selectors.EVENT_WRITE if self._pending else 0))
            return
        if self._tests is None:
            self._serve(selector, control, (selectors.EVENT_WRITE if self._pending else 0) | selectors.EVENT_READ)

    def _serve(self, selector: selectors.BaseSelector, fd: int, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            try:
                self._pending = self._pending[self._control.send(self._pending) :]
            except BlockingIOError:
                pass
            except OSError:
                self._pending = b""  # it does not listen any more
        if not events & selectors.EVENT_READ:
            return
        try:
            data = os.read(fd, 1 << 16)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        if not data:
            if fd in selector.get_map():
                selector.unregister(fd)
        elif not self._killed_for or fd == self._control.fileno():
            self._streams[fd] += data
            if fd == self._control.fileno():
                self._hear()

    def _hear(self) -> None:
        lines = bytes(self._streams[self._control.fileno()]).split(b"\n")[:-1]
        for line in lines[self._num_lines :]:
            if line == b"up" and self._began is None:
                self._began = time.monotonic()
            elif line == b"loaded" and self._tests is not None:
                self._pending += _frames([self._token, self._tests.first, str(len(self._tests.each)), *self._tests.each])
                self._tests = None
        self._num_lines = len(lines)

    def _fat(self) -> bool:
        now = time.monotonic()
        if self._began is None or now < max(self._began, self._looked) + LOOK_EVERY_S:
            return False
        self._looked = now
        return used_mib(self._child.pid, self._limits.memory_mib) > self._limits.memory_mib

    def _loud(self) -> bool:
        return sum(map(len, self._streams.values())) > self._limits.output_kib << 10

    def _kill(self, why: KilledFor) -> float:
        """End everything; until when it may take to be gone."""
        self._killed_for = why
        kill_tree(self._child.pid)
        return time.monotonic() + END_S

    def _ended(self) -> Ended:
        exit_code = self._child.wait()
        stdout, stderr, said = (bytes(stream) for stream in self._streams.values())
        if self._began is None:
            why = "it did not start in time" if self._killed_for else stderr.decode("utf-8", "replace")
            raise SandboxFailed(mend(why))
        lines = said.decode("utf-8", "replace").split("\n")[:-1]
        return Ended(
            exit_code=128 - exit_code if exit_code < 0 else exit_code,
            killed_for=self._killed_for,
            compiled=exit_code != NO_PYTHON,
            answers=_answers(lines, self._token),
            stdout=stdout,
            stderr=stderr,
            seconds=time.monotonic() - self._began,
        )


def _answers(lines: Iterable[str], token: str) -> dict[int, str]:
    """The first answer to each test; lines without the token are not ours."""
    found: dict[int, str] = {}
    for line in lines:
        mark, _, rest = line.partition(" ")
        index, _, answer = rest.partition(" ")
        if mark == token and index.isascii() and index.isdigit():
            found.setdefault(int(index), answer)
    return found


def _frames(texts: Iterable[str]) -> bytes:
    """Each with its length in front, four bytes little-endian."""
    encoded = [text.encode("utf-8", "surrogatepass").decode("utf-8", "replace").encode() for text in texts]
    return b"".join(len(data).to_bytes(4, "little") + data for data in encoded)
