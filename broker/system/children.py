"""Child processes that the kernel stops when their parent dies."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import IO, Any, Final

import psutil

from broker.system.private_files import PRIVATE_UMASK

_PR_SET_PDEATHSIG: Final = 1
_PRCTL: Final = getattr(ctypes.CDLL(None, use_errno=True), "prctl", None) if sys.platform == "linux" else None


def die_with(parent: int, death_signal: signal.Signals) -> None:
    """Make the kernel send ``death_signal`` when the parent dies; only system calls, for use between fork and exec."""
    if _PRCTL is not None:
        _PRCTL(_PR_SET_PDEATHSIG, int(death_signal), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def cpu_s(pid: int) -> float:
    """Return the seconds of processor time, user and system, that a process has used; 0 once it is reaped."""
    try:
        times: Any = psutil.Process(pid).cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system)


def spawn(
    command: Sequence[str],
    output: IO[bytes],
    *,
    errors: IO[bytes] | None = None,
    stdin: int = subprocess.DEVNULL,
    pass_fds: Sequence[int] = (),
    env: Mapping[str, str] | None = None,
    cwd: str | None = None,
    death_signal: signal.Signals = signal.SIGTERM,
) -> subprocess.Popen[bytes]:
    """Start a child whose stdout and stderr go to ``output``, or stderr to ``errors``.

    It receives ``death_signal`` when this process dies (Linux). The kernel sends it when the *thread* that forked ends,
    so a thread that lives as long as the child forks it. The child gets its own session: Ctrl-C in the terminal reaches
    only the parent, which stops its children in order. Files that it creates are private to this user.

    Raises:
        OSError: if the command cannot be started.
    """
    parent = os.getpid()

    started = threading.Event()
    outcome: list[subprocess.Popen[bytes] | OSError] = []

    def keep() -> None:
        try:
            child = subprocess.Popen(
                list(command),
                stdin=stdin,
                stdout=output,
                stderr=output if errors is None else errors,
                start_new_session=True,
                pass_fds=pass_fds,
                env=env,
                cwd=cwd,
                umask=PRIVATE_UMASK,
                preexec_fn=lambda: die_with(parent, death_signal),
            )
        except OSError as error:
            outcome.append(error)
            started.set()
            return
        outcome.append(child)
        started.set()
        child.wait()

    threading.Thread(target=keep, name="child-keeper", daemon=True).start()
    started.wait()
    if isinstance(outcome[0], OSError):
        raise outcome[0]
    return outcome[0]
