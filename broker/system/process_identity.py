"""Identifies a process across restarts, and decides whether one of this machine has ended.

An identity is ``<boot id>/<PID namespace>/<pid>/<start time>``: process ids are reused, the
combination is not.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

PROC = Path("/proc")


@cache
def this_machine() -> str:
    """Return the boot id and the PID namespace; empty if the system does not provide them."""
    try:
        boot = (PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{os.readlink(PROC / 'self/ns/pid')}"
    except OSError:
        return ""


def _start_time(pid: int) -> str | None:
    """Return a living process's start in clock ticks since boot; None if there is no such process
    or it is a zombie.
    """
    try:
        # The command in parentheses may contain anything; the state is the first field after it,
        # the start the 20th.
        fields = (PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


def this_process() -> str:
    """Return the identity of this process; empty if the system does not provide it."""
    return identity_of(os.getpid())


def identity_of(pid: int) -> str:
    """Return the identity of a process of this machine; empty if the system does not provide it."""
    machine = this_machine()
    return f"{machine}/{pid}/{_start_time(pid)}" if machine else ""


def has_ended(identity: str) -> bool:
    """Return whether a process has ended; False if it ran elsewhere: unknown."""
    parts = identity.rsplit("/", 2)
    if len(parts) != 3 or not parts[1].isdecimal():
        return False
    machine, pid, start_time = parts
    return bool(machine) and machine == this_machine() and _start_time(int(pid)) != start_time


def is_elsewhere(identity: str) -> bool:
    """Return whether a process is of another machine, boot or container."""
    return identity.count("/") > 1 and identity.rsplit("/", 2)[0] != this_machine()
