"""Starts processes with one end of a socket, such as one of our modules in a process of its own."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import IO, Final

from broker.system.children import spawn
from broker.system.process_tree import kill_tree
from rlearner_workers.environment import worker_environment

# The child gets our sys.path: ``-m`` would put the working folder first, so that a user's folder
# named ``broker`` would shadow ours.
BOOT: Final = """import os, runpy, sys; sys.path[:] = sys.argv.pop().split('\\n')
module, uid = sys.argv.pop(1).split(':')
if uid: os.setgroups([]); os.setresgid(*[int(uid)] * 3); os.setresuid(*[int(uid)] * 3)
runpy.run_module(module, run_name='__main__')"""


async def start_with_socket(
    launch: Callable[[socket.socket], subprocess.Popen[bytes]],
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Return a process and this end of its socket.

    Args:
        launch: starts the process, which inherits the other end; runs in a thread.

    Raises:
        OSError: if it cannot be started; both ends are closed then.
    """
    ours, theirs = socket.socketpair()

    def launch_and_close() -> subprocess.Popen[bytes]:
        with theirs:
            return launch(theirs)

    try:
        return await start_in_thread(launch_and_close), ours
    except BaseException:
        ours.close()
        raise


async def start_in_thread(
    launch: Callable[[], subprocess.Popen[bytes]],
) -> subprocess.Popen[bytes]:
    """Return a process that a thread starts; when cancelled, kill it once it has started."""
    starting = asyncio.create_task(asyncio.to_thread(launch))
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        starting.add_done_callback(_kill_started)
        raise


def _kill_started(starting: asyncio.Task[subprocess.Popen[bytes]]) -> None:
    if not starting.cancelled() and starting.exception() is None:
        kill_tree(starting.result().pid)


def start(
    module: str,
    theirs: socket.socket,
    output: IO[bytes],
    arguments: Sequence[str] = (),
    death_signal: signal.Signals = signal.SIGKILL,
    *,
    env: Mapping[str, str] | None = None,
    passed: Iterable[str] = (),
    within: Sequence[str] = (),
    uid: int = 0,
    files: Sequence[int] = (),
) -> subprocess.Popen[bytes]:
    """Run ``module`` as ``__main__`` with its socket's number and ``arguments``.

    It gets ``death_signal`` when this process dies; users' code may handle any signal but SIGKILL.

    Args:
        env: variables added to its environment.
        passed: names of further variables of this process that it gets, see ``worker_environment``.
        within: command that runs it in a sandbox, and is followed by the command of Python.
        uid: user that it becomes first; 0: stays who it is.
        files: descriptors that ``within`` needs.

    Raises:
        OSError: if it cannot be started.
    """
    path = "\n".join(folder or os.getcwd() for folder in sys.path)
    command = (
        *within,
        sys.executable,
        "-P",
        "-c",
        BOOT,
        f"{module}:{uid or ''}",
        str(theirs.fileno()),
        *arguments,
        path,
    )
    whole = {**worker_environment(passed), "OMP_NUM_THREADS": "1", **(env or {})}
    return spawn(
        command, output, pass_fds=(theirs.fileno(), *files), env=whole, death_signal=death_signal
    )
