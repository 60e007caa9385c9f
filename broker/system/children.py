"""Child processes that the kernel stops when their parent dies."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import IO, Any, Final

import psutil

from broker.system.private_files import PRIVATE_UMASK

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_DUMPABLE: Final = 4
_PRCTL: Final = (
    getattr(ctypes.CDLL(None, use_errno=True), "prctl", None) if sys.platform == "linux" else None
)


def die_with(parent: int, death_signal: signal.Signals) -> None:
    """Make the kernel send ``death_signal`` when the parent dies; only system calls, for use
    between fork and exec.
    """
    if _PRCTL is not None:
        _PRCTL(_PR_SET_PDEATHSIG, int(death_signal), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


# Runs between fork and exec of the command, in a process of its own: a forked copy of a process
# with threads may only make system calls, and copying the page tables of a large one takes longer.
# Where Linux shares processor time out by session first (autogroup), niceness counts only within a
# session, so the child's new session gets it too. All users together may change ten sessions in a
# second; a child that only inherits its niceness does not wait for that.
_LAUNCH: Final = """import ctypes, os, sys, time
parent, signal, nice, *command = sys.argv[1:]
prctl = getattr(ctypes.CDLL(None), "prctl", None)
prctl is None or prctl(1, int(signal), 0, 0, 0)
os.getppid() == int(parent) or os._exit(1)
level = os.nice(int(nice))
for attempt in range((1 if nice == "0" else 20) if level > 0 else 0):
    time.sleep(0.1 if attempt else 0)
    try:
        with open("/proc/self/autogroup", "w") as file:
            file.write(str(level))
        break
    except BlockingIOError:
        continue
    except OSError:
        break
try:
    os.execvp(command[0], command)
except OSError as error:
    print(f"cannot start {command[0]}: {error.strerror}", file=sys.stderr)
    os._exit(127)
"""


def hide_memory() -> None:
    """Keep other processes of this user, perhaps users' code, from reading our memory.

    Root still can. Debuggers and profilers of this process need root, and it writes no core dump.
    """
    if _PRCTL is not None:
        _PRCTL(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def cpu_s(pid: int) -> float:
    """Return the processor seconds that a process has used; 0 once it is reaped."""
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
    nice: int = 0,
) -> subprocess.Popen[bytes]:
    """Start a child whose stdout and stderr go to ``output``, or stderr to ``errors``.

    It receives ``death_signal`` when this process dies (Linux). The kernel sends it when the
    *thread* that forked ends, so a thread that lives as long as the child forks it. The child gets
    its own session: Ctrl-C in the terminal reaches only the parent, which stops its children in
    order. Files that it creates are private to this user.

    Args:
        nice: added to this process's niceness; higher gives way to others.

    Raises:
        OSError: if the command cannot be started.
    """
    program = os.path.join(cwd or "", command[0]) if os.path.dirname(command[0]) else command[0]
    if shutil.which(program, path=(os.environ if env is None else env).get("PATH")) is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), command[0])
    launcher = [
        sys.executable,
        "-I",
        "-S",
        "-c",
        _LAUNCH,
        str(os.getpid()),
        str(int(death_signal)),
        str(nice),
    ]

    has_started = threading.Event()
    outcome: list[subprocess.Popen[bytes] | OSError] = []

    def keep() -> None:
        try:
            child = subprocess.Popen(
                [*launcher, *command],
                stdin=stdin,
                stdout=output,
                stderr=output if errors is None else errors,
                start_new_session=True,
                pass_fds=pass_fds,
                env=env,
                cwd=cwd,
                umask=PRIVATE_UMASK,
            )
        except OSError as error:
            outcome.append(error)
            has_started.set()
            return
        outcome.append(child)
        has_started.set()
        child.wait()

    threading.Thread(target=keep, name="child-keeper", daemon=True).start()
    has_started.wait()
    if isinstance(outcome[0], OSError):
        raise outcome[0]
    return outcome[0]
