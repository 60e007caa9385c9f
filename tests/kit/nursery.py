"""Processes of the weight channel's tests, forked from one that has imported torch and the channel
already, which takes seconds.

Run as a program it is that one: for each request on the socket that it is given the number of, a
JSON list of a script and its arguments with a file for the standard output, it forks a process that
runs the script, and answers with its number.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

from waits import LONG_S, runs, until

HERE = Path(__file__).parent


class Born:
    """A process that was forked, as ``asyncio.subprocess.Process`` is spoken to."""

    def __init__(
        self, pid: int, stdout: asyncio.StreamReader, transport: asyncio.ReadTransport
    ) -> None:
        self.pid, self.stdout, self._transport = pid, stdout, transport

    @property
    def returncode(self) -> int | None:
        """None while it runs; what it returned is not known."""
        return None if runs(self.pid) else 0

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    async def wait(self) -> None:
        await until(lambda: not runs(self.pid))
        self._transport.close()


class Nursery:
    """The one process, started with the first request of a test run and ended with it."""

    def __init__(self) -> None:
        self._line: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._one_at_a_time = threading.Lock()

    async def bear(self, script: str, *arguments: str) -> Born:
        """A process that runs a script of this folder."""
        theirs, ours = await asyncio.to_thread(
            self._bear, json.dumps([str(HERE / script), *arguments])
        )
        reader = asyncio.StreamReader()
        pipe = os.fdopen(ours, "rb")
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), pipe
        )
        return Born(theirs, reader, transport)

    def _bear(self, request: str) -> tuple[int, int]:
        ours, theirs = os.pipe()
        with self._one_at_a_time:
            line = self._line or self._start()
            socket.send_fds(line, [request.encode()], [theirs])
            pid = int(line.recv(64))
        os.close(theirs)
        return pid, ours

    def _start(self) -> socket.socket:
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        path = os.pathsep.join([str(HERE), str(HERE.parents[1])])
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        )
        theirs.close()
        self._line.settimeout(2 * LONG_S)  # it imports first
        return self._line

    def close(self) -> None:
        """No more of them; those that run are their tests' to end."""
        if self._line is not None and self._process is not None:
            self._line.close()
            self._process.wait(60)
            self._line = self._process = None


NURSERY = Nursery()
atexit.register(NURSERY.close)


def main(line: socket.socket) -> None:
    import weights_child  # noqa: F401  # with all that it imports
    import weights_learner  # noqa: F401

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    while True:
        request, files, _, _ = socket.recv_fds(line, 1 << 16, 1)
        if not request:
            return
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            line.close()
            os.dup2(files[0], 1)
            os.close(files[0])
            sys.argv = json.loads(request)
            runpy.run_path(sys.argv[0], run_name="__main__")
            return
        os.close(files[0])
        line.send(str(pid).encode())


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
