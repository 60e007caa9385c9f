"""Identify a process across restarts, and tell whether one of this machine has ended.

An identity is ``<boot id>/<PID namespace>/<pid>/<start time>``: a process id is used again sooner or later, the four
together are not.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

PROC = Path("/proc")


@cache
def _machine() -> str:
    """This boot of this machine, and the namespace in which process ids mean something; empty where the system does not
    tell.
    """
    try:
        boot = (PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{os.readlink(PROC / 'self/ns/pid')}"
    except OSError:
        return ""


def _started(pid: int) -> str | None:
    """When a living process started, in clock ticks since the boot; None if there is no such process or it is a
    zombie.
    """
    try:
        # The command stands in parentheses and may hold anything; the state is the first field after it, the start time
        # the 20th.
        fields = (PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


def this_process() -> str:
    """Return the identity of this process, empty where the system does not tell."""
    machine, pid = _machine(), os.getpid()
    return f"{machine}/{pid}/{_started(pid)}" if machine else ""


def has_ended(identity: str) -> bool:
    """Return whether the process is known to have ended; False for one of another machine, boot or container, which
    cannot be seen.
    """
    parts = identity.rsplit("/", 2)
    if len(parts) != 3 or not parts[1].isdecimal():
        return False
    machine, pid, started = parts
    return bool(machine) and machine == _machine() and _started(int(pid)) != started
