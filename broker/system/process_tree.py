"""A process and all its descendants: lists them, measures their memory, kills them (Linux)."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Final

MIB: Final = 1 << 20
_PAGE: Final = os.sysconf("SC_PAGE_SIZE")


def process_tree(pid: int) -> list[int]:
    """Return the process and all its descendants."""
    pids = [pid]
    # The list grows while it is walked. All threads are read: each lists only its own children.
    for process in pids:
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{process}/task"):
                with contextlib.suppress(OSError):
                    children = Path(f"/proc/{process}/task/{thread}/children")
                    pids += map(int, children.read_text(encoding="ascii").split())
    return pids


def kill_tree(pid: int) -> None:
    """Send SIGKILL to a process, its session, and its descendants in other sessions."""
    doomed = process_tree(pid)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    for process in doomed:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def resident_mib(pids: Iterable[int]) -> float:
    """Return the resident memory of some processes; those that have ended count 0."""
    pages = 0
    for pid in pids:
        with contextlib.suppress(OSError, IndexError, ValueError):
            pages += int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    return pages * _PAGE / MIB
