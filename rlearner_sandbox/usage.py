"""Measures memory and processor time of a process and its descendants (Linux)."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Final

from broker.system.process_tree import process_tree, resident_mib

_TICKS: Final = os.sysconf("SC_CLK_TCK")


def used_mib(pid: int, enough: float) -> float:
    """Return MiB of the process and its descendants.

    Shared pages count once, which takes time, only if the sum with repeats exceeds ``enough``.
    """
    pids = process_tree(pid)
    resident = resident_mib(pids)
    if resident <= enough:
        return resident
    return sum(_share_mib(process) for process in pids)


def most_cpu_s(pid: int) -> float:
    """Return the processor seconds of the busiest of the process and its descendants."""
    most = 0
    for process in process_tree(pid):
        with contextlib.suppress(OSError, IndexError, ValueError):
            fields = (
                Path(f"/proc/{process}/stat")
                .read_text(encoding="utf-8", errors="replace")
                .rpartition(")")[2]
                .split()
            )
            utime = int(fields[11])
            stime = int(fields[12])
            most = max(most, utime + stime)
    return most / _TICKS


def _share_mib(pid: int) -> float:
    """Return its pages, each divided by the number of processes that share it."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) / 1024
    return resident_mib([pid])
