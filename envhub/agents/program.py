"""Runs a program to its end: a text on its stdin, the end of what it prints kept, everything that it started killed
afterwards.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from broker.system.children import spawn
from broker.system.workers import limits

KEPT_BYTES: Final = 1 << 16  # of each of the two outputs, from the end
FLUSH_S: Final = 1.0  # for what it wrote to come out of the pipes once it has ended


@dataclass(frozen=True)
class ProgramExit:
    """How it ended.

    Attributes:
        status: as ``subprocess`` has it.
        stdout, stderr: the end of each.
        is_cut: whether it printed more than ``stdout``.
    """

    status: int
    stdout: str
    stderr: str
    is_cut: bool


async def run(command: Sequence[str], given: str, env: Mapping[str, str], cwd: str | None) -> ProgramExit:
    """Run it in a session of its own. Cancelled, it kills the whole session and what descends from it.

    The kernel kills the program itself when this process dies; what it started then finds its endpoint gone.

    Raises:
        OSError: it cannot be started.
    """
    outputs = [os.pipe(), os.pipe()]
    stdin = os.memfd_create("task")
    try:
        os.write(stdin, given.encode())
        os.lseek(stdin, 0, os.SEEK_SET)
        files = [os.fdopen(end, "wb", buffering=0) for _, end in outputs]
        try:
            child = await _started(
                asyncio.to_thread(
                    spawn,
                    command,
                    files[0],
                    stdin=stdin,
                    errors=files[1],
                    env=env,
                    cwd=cwd,
                    death_signal=signal.SIGKILL,
                )
            )
        finally:
            for file in files:
                file.close()
    except BaseException:
        for end, _ in outputs:
            os.close(end)
        raise
    finally:
        os.close(stdin)
    reading = [asyncio.create_task(_tail(end)) for end, _ in outputs]
    try:
        status = await _status(child)
        limits.kill_tree(child.pid)  # what it left behind in its session, which also holds the pipes open
        await asyncio.wait(reading, timeout=FLUSH_S)
    finally:
        limits.kill_tree(child.pid)
        for task in reading:
            task.cancel()
        tails = await asyncio.gather(*reading, return_exceptions=True)
    (stdout, is_cut), (stderr, _) = ((b"", False) if isinstance(tail, BaseException) else tail for tail in tails)
    return ProgramExit(status, stdout.decode("utf-8", "replace"), stderr.decode("utf-8", "replace"), is_cut)


async def _started(work: Coroutine[Any, Any, subprocess.Popen[bytes]]) -> subprocess.Popen[bytes]:
    """A thread cannot be cancelled: what it starts for nobody is killed at once."""
    starting = asyncio.create_task(work)
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        starting.add_done_callback(lambda done: None if done.exception() else limits.kill_tree(done.result().pid))
        raise


async def _status(child: subprocess.Popen[bytes]) -> int:
    """Wait without a thread: hundreds may run at once."""
    try:
        handle = os.pidfd_open(child.pid)
    except ProcessLookupError:
        return child.wait()
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(handle, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(handle)
        os.close(handle)
    return child.wait()


async def _tail(end: int) -> tuple[bytes, bool]:
    """The last bytes of a pipe, those so far when cancelled; and whether there were more."""
    kept, is_cut = bytearray(), False
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(end, "rb", buffering=0)
    )
    try:
        while piece := await reader.read(KEPT_BYTES):
            kept += piece
            is_cut = is_cut or len(kept) > KEPT_BYTES
            del kept[:-KEPT_BYTES]
    except asyncio.CancelledError:
        pass  # something else still holds the pipe open
    finally:
        transport.close()
    return bytes(kept), is_cut
