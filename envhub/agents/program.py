"""Runs a program with a text on stdin, and kills all that it started when it ends."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from broker.system.children import spawn
from broker.system.process_tree import kill_tree
from rlearner_workers.start import start_in_thread

# of each of the two outputs, from the end
KEPT_BYTES: Final = 1 << 16
# for the pipes to drain once the program has ended
FLUSH_S: Final = 1.0


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
    stdin_text: str,
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
    # a file, not a pipe: writing never blocks, even if the program does not read
    stdin = os.memfd_create("task")
    try:
        os.write(stdin, stdin_text.encode())
        os.lseek(stdin, 0, os.SEEK_SET)
        out, errors = (os.fdopen(write_end, "wb", buffering=0) for _, write_end in outputs)
        with out, errors:
            start = partial(
                spawn,
                command,
                out,
                stdin=stdin,
                errors=errors,
                env=env,
                cwd=cwd,
                pass_fds=files,
                death_signal=signal.SIGKILL,
            )
            child = await start_in_thread(start)
    except BaseException:
        for read_end, _ in outputs:
            os.close(read_end)
        raise
    finally:
        os.close(stdin)
    tail_tasks = [asyncio.create_task(_read_tail(read_end)) for read_end, _ in outputs]
    try:
        status = await _await_exit(child)
        # what is left of its session would hold the pipes open
        kill_tree(child.pid)
        await asyncio.wait(tail_tasks, timeout=FLUSH_S)
    finally:
        kill_tree(child.pid)
        for task in tail_tasks:
            task.cancel()
        tails = await asyncio.gather(*tail_tasks, return_exceptions=True)
    (stdout, is_cut), (stderr, _) = (
        (b"", False) if isinstance(tail, BaseException) else tail for tail in tails
    )
    return ProgramExit(
        status, stdout.decode("utf-8", "replace"), stderr.decode("utf-8", "replace"), is_cut
    )


async def _await_exit(child: subprocess.Popen[bytes]) -> int:
    """Wait for the exit without a thread: hundreds may run at once."""
    try:
        handle = os.pidfd_open(child.pid)
    except ProcessLookupError:
        return child.wait()
    loop = asyncio.get_running_loop()
    exit_event = asyncio.Event()
    loop.add_reader(handle, exit_event.set)
    try:
        await exit_event.wait()
    finally:
        loop.remove_reader(handle)
        os.close(handle)
    return child.wait()


async def _read_tail(descriptor: int) -> tuple[bytes, bool]:
    """Return the last bytes of a pipe and whether there were more; when cancelled, those so far."""
    tail = bytearray()
    is_cut = False
    reader = asyncio.StreamReader()
    pipe = os.fdopen(descriptor, "rb", buffering=0)
    connect = asyncio.get_running_loop().connect_read_pipe
    transport, _ = await connect(lambda: asyncio.StreamReaderProtocol(reader), pipe)
    try:
        while piece := await reader.read(KEPT_BYTES):
            tail += piece
            is_cut = is_cut or len(tail) > KEPT_BYTES
            del tail[:-KEPT_BYTES]
    except asyncio.CancelledError:
        # something else still holds the pipe open
        pass
    finally:
        transport.close()
    return bytes(tail), is_cut
