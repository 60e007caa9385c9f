"""Calls a function in a forked process that the kernel kills if one call takes too much CPU time.

A response can make a library compute for hours, even inside C code that no exception reaches. The
process is forked from one that has loaded the library, so a replacement takes milliseconds. The
limit counts CPU time, not wall time, because a slow machine must not change a reward; how long a
whole score may take is limited by the hub.
"""

from __future__ import annotations

import os
import signal
import weakref
from collections.abc import Callable
from typing import Final

from broker.errors import described
from rlearner_workers import limits
from rlearner_workers.frames import read_frame, write_frame

_OK = b"+"
_COSTLY = b"!"
_FAILED = b"-"
# Signals by which a call ends its own process: too much CPU time, too deep a recursion, a number
# too large for C code.
_OWN_FAULT: Final = (signal.SIGPROF, signal.SIGSEGV, signal.SIGABRT, signal.SIGFPE)


class TooCostly(Exception):
    """The call took too much CPU time or memory, or recursed too deeply."""


class BoundedFunction:
    """A function whose calls are bounded. Not thread-safe.

    Args:
        function: from bytes to bytes; runs in the forked process.
        cpu_s: CPU time of one call.
        memory_mib: memory of the process beyond what it inherits.
    """

    def __init__(
        self, function: Callable[[bytes], bytes], *, cpu_s: float, memory_mib: int
    ) -> None:
        self._function = function
        self._cpu_s = cpu_s
        self._memory_mib = memory_mib
        self._child: _Child | None = None

    def __call__(self, data: bytes) -> bytes:
        """Call the function.

        Raises:
            TooCostly: if the call exceeds a limit.
            RuntimeError: if the function raises, or the process is killed from outside.
        """
        if self._child is None or not self._child.alive():
            self._child = _Child(self._function, self._cpu_s, self._memory_mib)
        reply = self._child.ask(data)
        if reply is None:
            status = self._child.status()
            self._child = None
            if -status in _OWN_FAULT:
                over = -status == signal.SIGPROF
                raise TooCostly(
                    f"more than {self._cpu_s:g} s" if over else limits.how_ended(status)
                )
            raise RuntimeError(f"the process that computes {limits.how_ended(status)}")
        if reply[:1] == _COSTLY:
            # Its memory may hold unfinished work.
            self._child = None
            raise TooCostly(reply[1:].decode())
        if reply[:1] == _FAILED:
            raise RuntimeError(reply[1:].decode())
        return reply[1:]


class _Child:
    """The forked process and its pipes; it exits when this object is deleted."""

    def __init__(self, function: Callable[[bytes], bytes], cpu_s: float, memory_mib: int) -> None:
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        pid = os.fork()
        if pid == 0:
            _serve_requests(theirs_in, theirs_out, function, cpu_s, memory_mib)
        os.close(theirs_in)
        os.close(theirs_out)
        self._pid = pid
        self._end = weakref.finalize(self, _end_process, self._in, self._out, pid)

    def alive(self) -> bool:
        return (
            self._end.alive
            and os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
        )

    def ask(self, data: bytes) -> bytes | None:
        """Return the answer, or None if the process exited."""
        return read_frame(self._in) if write_frame(self._out, data) else None

    def status(self) -> int:
        """Wait for the process and return its exit code, negative for a signal."""
        return int(self._end() or 0)


def _end_process(fd_in: int, fd_out: int, pid: int) -> int:
    # An idle process exits when this closes.
    os.close(fd_out)
    os.close(fd_in)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _serve_requests(
    fd_in: int, fd_out: int, function: Callable[[bytes], bytes], cpu_s: float, memory_mib: int
) -> None:
    """Serve in the forked process; never returns."""
    code = 1
    try:
        kept_fds = sorted((fd_in, fd_out))
        # Close inherited sockets, which would stay open after the parent exits.
        for low, high in zip(
            (3, kept_fds[0] + 1, kept_fds[1] + 1),
            (*kept_fds, os.sysconf("SC_OPEN_MAX")),
            strict=True,
        ):
            os.closerange(low, high)
        for number in (signal.SIGPROF, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        limits.be_expendable()
        limits.ResourceLimits(memory_mib)
        while (data := read_frame(fd_in)) is not None:
            signal.setitimer(signal.ITIMER_PROF, cpu_s)
            reply = _compute_reply(function, data)
            signal.setitimer(signal.ITIMER_PROF, 0)
            write_frame(fd_out, reply)
        code = 0
    finally:
        os._exit(code)


def _compute_reply(function: Callable[[bytes], bytes], data: bytes) -> bytes:
    try:
        return _OK + function(data)
    except (MemoryError, RecursionError, TooCostly) as error:
        return _COSTLY + (str(error) or type(error).__name__).encode("utf-8", "replace")
    except Exception as error:  # noqa: BLE001 - the caller raises it
        return _FAILED + described(error).encode("utf-8", "replace")
