"""Talks to a process in the sandbox: sends its input, reads its output, ends it in time.

Texts go through a socket, each preceded by its length; responses come back as lines.
"""

from __future__ import annotations

import os
import selectors
import socket
import subprocess
import time
from collections.abc import Callable, Iterable
from typing import Final

from broker.errors import RlearnerError
from broker.system.process_tree import kill_tree
from broker.system.work_clock import READY, WorkClock
from rlearner_sandbox.command import SandboxLimits, advice
from rlearner_sandbox.ended import NO_PYTHON, OUT_OF_TIME, KilledFor, ProgramEnd
from rlearner_sandbox.usage import most_cpu_s, used_mib
from rlearner_workers.frames import pack_frame

START_S: Final = 20.0  # until the program begins
END_S: Final = 10.0  # until all its processes are gone once they have been killed
LOOK_EVERY_S: Final = 0.1
CLOCK_EVERY_S: Final = 0.5
SIGKILLED: Final = 128 + 9


class SandboxFailed(RlearnerError):
    """Raised when the sandbox itself failed, which says nothing about the program."""


class SandboxProcess:
    """One process while it runs; leaving the context removes every trace of it.

    Args:
        child: the process of the sandbox, with pipes for its output.
        control: our end of the socket to ``inside.py``.
        wall_s: its time limit from the moment it begins.
        texts: sent first.
        then: sent once it has loaded the program.
        token: prefix of lines with answers; empty: it sends none.

    Attributes: ``loaded``: it has loaded the program; ``silent``: it has closed the socket.
    """

    def __init__(
        self,
        child: subprocess.Popen[bytes],
        control: socket.socket,
        limits: SandboxLimits,
        wall_s: float,
        texts: Iterable[str],
        later_texts: Iterable[str] = (),
        token: str = "",
    ) -> None:
        self._child = child
        self._control = control
        self._limits = limits
        self._wall_s = wall_s
        assert child.stdout is not None
        assert child.stderr is not None
        fds = (child.stdout.fileno(), child.stderr.fileno(), control.fileno())
        self._streams = {fd: bytearray() for fd in fds}
        self._handle = os.pidfd_open(child.pid)
        self._pending = _frame_texts(texts)
        self._later_texts = _frame_texts(later_texts)
        self._token = token
        self._killed_for: KilledFor = ""
        self._killed = self._stopped = False
        self._began: float | None = None
        self._deadline: float = time.monotonic() + START_S
        self._clock = WorkClock(child.pid, READY)
        self._clocked_at = time.monotonic()
        self._looked = 0.0
        self._num_lines = 0
        self._cpu_s = 0.0
        self.loaded = self.silent = False

    def __enter__(self) -> SandboxProcess:
        return self

    def __exit__(self, *_: object) -> None:
        kill_tree(self._child.pid)
        self._child.wait()
        for stream in (self._child.stdout, self._child.stderr):
            if stream is not None:
                stream.close()
        self._control.close()
        os.close(self._handle)

    def register(self, selector: selectors.BaseSelector) -> None:
        """Register with a selector. The reports of a script do not wake it up, which would delay
        its start.
        """
        selector.register(self._handle, selectors.EVENT_READ, self)
        for fd in self._streams:
            os.set_blocking(fd, False)
            if self._token or fd != self._control.fileno():
                selector.register(fd, selectors.EVENT_READ, self)

    def unlimited(self) -> float:
        """Remove the time limit and return the seconds left of it."""
        seconds_left = self._deadline - time.monotonic()
        self._deadline = float("inf")
        return seconds_left

    def stop(self, *, after_s: float = 0.0) -> None:
        """Kill it unless it exits within this many seconds, which counts as a normal end."""
        if not self._killed:
            self._stopped = True
            self._deadline = time.monotonic() + after_s

    def converse(self, selector: selectors.BaseSelector) -> None:
        """Write as much as there is room for."""
        control = self._control.fileno()
        events = selectors.EVENT_READ
        if self._pending:
            events |= selectors.EVENT_WRITE
        if control in selector.get_map():
            selector.modify(control, events, self)
        elif not self._token:
            self.serve(selector, control, events)

    def serve(self, selector: selectors.BaseSelector, fd: int, events: int) -> None:
        """Handle a stream that is ready."""
        if events & selectors.EVENT_WRITE:
            try:
                self._pending = self._pending[self._control.send(self._pending) :]
            except BlockingIOError:
                pass
            except OSError:
                # It does not listen any more.
                self._pending = b""
        if not events & selectors.EVENT_READ:
            return
        if fd == self._handle:  # it has ended
            selector.unregister(fd)
            return
        try:
            data = os.read(fd, 1 << 16)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        # A killed process may have filled its pipes: what it prints is dropped, reports are not.
        if not data:
            self.silent = self.silent or fd == self._control.fileno()
            if fd in selector.get_map():
                selector.unregister(fd)
        elif not self._killed or fd == self._control.fileno():
            self._streams[fd] += data
            if fd == self._control.fileno():
                self._read_reports()

    def watch(self) -> None:
        """Kill the process if it exceeds a limit; raise SandboxFailed if it does not end then.

        Time in which the machine gives its processes no processor does not count.
        """
        if not self._stopped and time.monotonic() > self._clocked_at + CLOCK_EVERY_S:
            self._deadline += self._clock.look()
            self._clocked_at = time.monotonic()
        if time.monotonic() > self._deadline:
            if self._killed:
                raise SandboxFailed("processes that were killed are still there")
            self._kill("" if self._stopped else "time")
        elif not self._killed and self._exceeds_memory():
            self._kill("memory")
        elif (
            not self._killed
            and sum(map(len, self._streams.values())) > self._limits.output_kib << 10
        ):
            self._kill("output")

    def _read_reports(self) -> None:
        lines = bytes(self._streams[self._control.fileno()]).split(b"\n")[:-1]
        for line in lines[self._num_lines :]:
            if line == b"up" and self._began is None:
                self._began = time.monotonic()
                if not self._killed and not self._stopped:
                    self._deadline = self._began + self._wall_s
            elif line == b"loaded" and not self.loaded:
                self.loaded = True
                self._pending += self._later_texts
        self._num_lines = len(lines)

    def _exceeds_memory(self) -> bool:
        now = time.monotonic()
        if self._began is None or now < max(self._began, self._looked) + LOOK_EVERY_S:
            return False
        self._looked = now
        if now > self._began + self._limits.cpu_s:
            self._cpu_s = max(self._cpu_s, most_cpu_s(self._child.pid))
        return used_mib(self._child.pid, self._limits.memory_mib) > self._limits.memory_mib

    def _kill(self, reason: KilledFor) -> None:
        self._killed = True
        self._killed_for = reason
        kill_tree(self._child.pid)
        self._deadline = time.monotonic() + END_S

    def ended(self) -> ProgramEnd:
        """Return how the process ended; raise SandboxFailed if it never began."""
        exit_code = self._child.wait()
        if exit_code < 0:
            # Killed by that signal, written as a shell does: bwrap reports it so itself.
            exit_code = 128 - exit_code
        stdout, stderr, answer_lines = (bytes(stream) for stream in self._streams.values())
        if self._began is None:
            if self._killed_for:
                raise SandboxFailed(advice("it did not start in time"))
            raise SandboxFailed(advice(stderr.decode("utf-8", "replace")))
        if exit_code == SIGKILLED and not self._killed_for:
            if self._killed:
                exit_code = 0
            elif self._cpu_s >= self._limits.cpu_s:
                # The kernel kills a program that ignores SIGXCPU, a second later.
                exit_code = OUT_OF_TIME
        answers = _parse_answers(
            answer_lines.decode("utf-8", "replace").split("\n")[:-1], self._token
        )
        seconds = time.monotonic() - self._began
        compiled = exit_code != NO_PYTHON
        return ProgramEnd(
            exit_code,
            self._killed_for,
            compiled,
            answers=answers,
            stdout=stdout,
            stderr=stderr,
            seconds=seconds,
        )


class ProcessLoop:
    """Serves several processes at once."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._talks: list[SandboxProcess] = []

    def __enter__(self) -> ProcessLoop:
        return self

    def __exit__(self, *_: object) -> None:
        self._selector.close()

    def add(self, talk: SandboxProcess) -> None:
        self._talks.append(talk)
        talk.register(self._selector)

    def remove(self, talk: SandboxProcess) -> None:
        """Remove a process that has ended."""
        self._talks.remove(talk)

    def until(self, is_done: Callable[[], bool]) -> None:
        """Serve until ``done`` or until all processes have ended."""
        while not is_done() and self._selector.get_map():
            for talk in self._talks:
                talk.converse(self._selector)
            for key, events in self._selector.select(LOOK_EVERY_S):
                key.data.serve(self._selector, key.fd, events)
            for talk in self._talks:
                talk.watch()
        for talk in self._talks:
            talk.converse(self._selector)

    def is_over(self, talk: SandboxProcess) -> bool:
        """Whether one has ended and all its streams are closed."""
        return all(key.data is not talk for key in self._selector.get_map().values())


def _parse_answers(lines: Iterable[str], token: str) -> dict[int, str]:
    """Return the first answer to each test; lines without the token are not ours."""
    answers: dict[int, str] = {}
    for line in lines:
        mark, _, fields = line.partition(" ")
        index, _, answer = fields.partition(" ")
        if mark == token and index.isascii() and index.isdigit():
            answers.setdefault(int(index), answer)
    return answers


def _frame_texts(texts: Iterable[str]) -> bytes:
    """Return the texts, each prefixed with its length in four bytes little-endian."""
    encoded = [
        text.encode("utf-8", "surrogatepass").decode("utf-8", "replace").encode() for text in texts
    ]
    return b"".join(map(pack_frame, encoded))
