"""Runs a command, and leaves no process behind: neither when it ends nor when the hub is killed.

    python -I -S guard.py PID COMMAND [ARGUMENT ...]

PID is the process that the command belongs to. The guard adopts whatever the command leaves behind,
daemons too, and kills all of it when the command ends, when that process dies, or on SIGTERM. It
imports nothing of this project, so that it starts within milliseconds.
"""

import contextlib
import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
PRIVATE_UMASK = 0o077


def run_command(parent: int, command: list[str]) -> int:
    """Run the command to its end and return its exit status as a shell does."""
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGTERM, end_all)
    prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    if os.getppid() != parent:
        return 1
    os.umask(PRIVATE_UMASK)
    guard = os.getpid()
    child = os.fork()
    if child == 0:
        become_command(guard, command)
    while True:
        pid, status = os.wait()
        if pid == child:
            kill_descendants()
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def become_command(guard: int, command: list[str]) -> None:
    """Replace this process by the command; it dies with the guard."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != guard:
        os._exit(1)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"cannot start {command[0]}: {error.strerror}", file=sys.stderr)
    os._exit(127)


def kill_descendants() -> None:
    """Kill until none is left: the children of a dead process become this process's."""
    children = f"/proc/{os.getpid()}/task/{os.getpid()}/children"
    while True:
        with open(children, encoding="ascii") as file:
            pids = [int(pid) for pid in file.read().split()]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            os.wait()
        except ChildProcessError:
            return


def end_all(number: int, frame: object) -> None:
    """Kill everything and exit."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    kill_descendants()
    os._exit(128 + number)


if __name__ == "__main__":
    sys.exit(run_command(int(sys.argv[1]), sys.argv[2:]))
