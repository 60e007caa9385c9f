"""Reads the processor time of processes and of their descendants."""

from __future__ import annotations

import contextlib
import math
import time
from collections import defaultdict
from collections.abc import Collection
from typing import Final

import psutil

# Listing every process of the machine takes tens of milliseconds, reading the time of one a tenth.
LIST_EVERY_S: Final = 10.0


class ProcessorTimes:
    """Reads processor times again and again; new descendants are seen within ``LIST_EVERY_S``."""

    def __init__(self) -> None:
        self._families: dict[int, list[psutil.Process]] = {}
        self._listed_at = -math.inf

    def read(self, pids: Collection[int]) -> dict[int, float]:
        """Return seconds by pid, with descendants and children that a process waited for.

        A process that has ended is left out.
        """
        now = time.monotonic()
        if now - self._listed_at >= LIST_EVERY_S or not self._families.keys() >= set(pids):
            self._families = list_families(pids)
            self._listed_at = now
        seconds = {}
        for pid in pids:
            with contextlib.suppress(psutil.Error, ValueError):
                root, *descendants = self._families[pid]
                seconds[pid] = own_seconds(root)
                for process in descendants:
                    with contextlib.suppress(psutil.Error):
                        seconds[pid] += own_seconds(process)
        return seconds


def own_seconds(process: psutil.Process) -> float:
    """Return user and system time of a process and of the children that it waited for.

    Raises:
        psutil.Error: if the process has ended.
    """
    return sum(process.cpu_times()[:4])


def list_families(pids: Collection[int]) -> dict[int, list[psutil.Process]]:
    """Return each process with its living descendants, itself first; nothing if it has ended."""
    children: dict[int, list[psutil.Process]] = defaultdict(list)
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            children[process.ppid()].append(process)
    families: dict[int, list[psutil.Process]] = {}
    for pid in pids:
        families[pid] = []
        with contextlib.suppress(psutil.Error):
            families[pid].append(psutil.Process(pid))
        for process in families[pid]:  # grows while it is read
            families[pid] += children[process.pid]
    return families
