"""Runs a program with a text on stdin, keeps the end of its output, and kills all that it started."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from broker.system.children import spawn
from broker.system.workers import limits

KEPT_BYTES: Final = 1 << 16  # of each of the two outputs, from the end
FLUSH_S: Final = 1.0  # for the pipes to drain once the program has ended


@dataclass(frozen=True)
class ProgramExit:
    """How a program ended.

    Attributes:
        status: as in ``subprocess``.
        stdout, stderr: the end of each.
        is_cut: whether it printed more than ``stdout``.
    """

    status: int
    stdout: str
    stderr: str
    is_cut: bool


async def run(
    command: Sequence[str],
    given: str,
    env: Mapping[str, str],
    cwd: str | None,
    files: Sequence[int] = (),
) -> ProgramExit:
    """Run a program in its own session; when cancelled, kill the session and all its descendants.

    Args:
        files: descriptors that it inherits.

    If this process dies, the kernel kills the program, and what it started finds the endpoint gone.

    Raises:
        OSError: if it cannot be started.
    """
    outputs = [os.pipe(), os.pipe()]
    stdin = os.memfd_create("task")
    try:
        os.write(stdin, given.encode())
        os.lseek(stdin, 0, os.SEEK_SET)
        out, errors = (os.fdopen(end, "wb", buffering=0) for _, end in outputs)
        with out, errors:
            start = partial(
                spawn, command, out, stdin=stdin, errors=errors, env=env, cwd=cwd, pass_fds=files
            )
            child = await _started(asyncio.to_thread(start, death_signal=signal.SIGKILL))
    except BaseException:
        for end, _ in outputs:
            os.close(end)
        raise
    finally:
        os.close(stdin)
    reading = [asyncio.create_task(_tail(end)) for end, _ in outputs]
    try:
        status = await _status(child)
        limits.kill_tree(child.pid)  # what is left of its session, which also holds the pipes open
        await asyncio.wait(reading, timeout=FLUSH_S)
    finally:
        limits.kill_tree(child.pid)
        for task in reading:
            task.cancel()
        tails = await asyncio.gather(*reading, return_exceptions=True)
    (stdout, is_cut), (stderr, _) = (
        (b"", False) if isinstance(tail, BaseException) else tail for tail in tails
    )
    return ProgramExit(
        status, stdout.decode("utf-8", "replace"), stderr.decode("utf-8", "replace"), is_cut
    )


async def _started(work: Coroutine[Any, Any, subprocess.Popen[bytes]]) -> subprocess.Popen[bytes]:
    """Wait for a start in a thread, which cannot be cancelled: kill the program at once if it comes
    too late.
    """
    starting = asyncio.create_task(work)
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        starting.add_done_callback(
            lambda done: None if done.exception() else limits.kill_tree(done.result().pid)
        )
        raise


async def _status(child: subprocess.Popen[bytes]) -> int:
    """Wait for the exit without a thread: hundreds may run at once."""
    try:
        handle = os.pidfd_open(child.pid)
    except ProcessLookupError:
        return child.wait()
    loop = asyncio.get_running_loop()
    has_ended = asyncio.Event()
    loop.add_reader(handle, has_ended.set)
    try:
        await has_ended.wait()
    finally:
        loop.remove_reader(handle)
        os.close(handle)
    return child.wait()


async def _tail(end: int) -> tuple[bytes, bool]:
    """Return the last bytes of a pipe, those so far when cancelled; and whether there were more."""
    tail = bytearray()
    is_cut = False
    reader = asyncio.StreamReader()
    pipe = os.fdopen(end, "rb", buffering=0)
    connect = asyncio.get_running_loop().connect_read_pipe
    transport, _ = await connect(lambda: asyncio.StreamReaderProtocol(reader), pipe)
    try:
        while piece := await reader.read(KEPT_BYTES):
            tail += piece
            is_cut = is_cut or len(tail) > KEPT_BYTES
            del tail[:-KEPT_BYTES]
    except asyncio.CancelledError:
        pass  # something else still holds the pipe open
    finally:
        transport.close()
    return bytes(tail), is_cut
