"""Limits a process's time on its own clock, which stops while the machine keeps it waiting.

A process that is ready to run while others have the processors, or that waits for a disk, is not
slow: its machine is. Limits on the wall clock end starts and scores on a loaded machine that would
have ended well. On this clock a process that sleeps or computes reaches its limit as on the wall
clock of an idle machine.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Final

from broker.system.process_tree import process_tree

READY: Final = "R"  # runs, or waits for a processor
# A program can feign D with vfork, so not for code that may be hostile.
READY_OR_DISK: Final = "RD"
_TICK_S: Final = 1.0 / os.sysconf("SC_CLK_TCK")


class WorkClock:
    """The own time of a process with its descendants, in seconds.

    Args:
        states: those of a thread in which it waits for the machine unless it gets processor time.

    Attributes:
        own_s: time in which they computed, or waited for something that is not the machine.
        wall_s: time that was looked at.
        cpu_s: processor time in it.
    """

    def __init__(self, pid: int, states: str = READY_OR_DISK) -> None:
        self._pid = pid
        self._states = states
        self._looked_at = time.monotonic()
        self._cpu_s = _read_clock(pid, states)[0]
        self.own_s = self.wall_s = self.cpu_s = 0.0

    def look(self, most_s: float = float("inf")) -> float:
        """Advance the clock. Return the seconds since the previous look in which it stood still.

        Args:
            most_s: of a longer time only so much counts, because this process did not run either.
        """
        now = time.monotonic()
        wall_s = now - self._looked_at
        self._looked_at = now
        cpu_s, waits = _read_clock(self._pid, self._states)
        used_s = sum(seconds - self._cpu_s.get(pid, 0.0) for pid, seconds in cpu_s.items())
        self._cpu_s = cpu_s
        own_s = min(used_s if waits else wall_s, wall_s, most_s)
        self.own_s = self.own_s + own_s
        self.wall_s = self.wall_s + wall_s
        self.cpu_s = self.cpu_s + used_s
        return wall_s - own_s

    def __str__(self) -> str:
        load = os.getloadavg()[0]
        cores = len(os.sched_getaffinity(0))
        usage = f"{self.wall_s:.0f} s, in which it used {self.cpu_s:.1f} s of processor time"
        return f"{usage} (the load is {load:.0f} on {cores} processors)"


def _read_clock(pid: int, states: str) -> tuple[dict[int, float], bool]:
    """Return the processor time of a process and its descendants, and whether a thread but this is
    in such a state.
    """
    cpu_s: dict[int, float] = {}
    waits = False
    for process in process_tree(pid):
        try:
            for thread in os.listdir(f"/proc/{process}/task"):
                text = Path(f"/proc/{process}/task/{thread}/stat").read_text(
                    encoding="ascii", errors="replace"
                )
                fields = text.rpartition(")")[2].split()
                waits = waits or (fields[0] in states and int(thread) != threading.get_native_id())
                cpu_s[process] = (
                    cpu_s.get(process, 0.0) + (int(fields[11]) + int(fields[12])) * _TICK_S
                )
        except (OSError, IndexError):
            continue  # it has ended
    return cpu_s, waits
