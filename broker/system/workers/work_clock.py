"""Limits a process's time on its own clock, which stops while the machine keeps it waiting.

A process that is ready to run while others have the processors, or that waits for a disk, is not
slow: its machine is. Limits on the wall clock end starts and scores on a loaded machine that would
have ended well. On this clock a process that sleeps or computes reaches its limit as on the wall
clock of an idle machine.
"""

from __future__ import annotations

import asyncio
import logging
import os
import select
import socket
import subprocess
import threading
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, Final, TypeVar

from broker.errors import RlearnerError
from broker.system.reminders import Reminders
from broker.system.workers import limits

log = logging.getLogger(__name__)

READY: Final = "R"  # runs, or waits for a processor
# A program can feign D with vfork, so not for code that may be hostile.
READY_OR_DISK: Final = "RD"
LONGEST_LOOK_S: Final = 5.0  # between two looks; all threads of all descendants are read
LOOKS: Final = 10  # within a limit
SLOW_AFTER_S: Final = 15.0
_TICK_S: Final = 1.0 / os.sysconf("SC_CLK_TCK")

A = TypeVar("A")


class OutOfTime(RlearnerError):
    """A process has used its time."""


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


async def answer_within(
    work: Coroutine[Any, Any, A], pid: int, limit_s: float, name: str = ""
) -> A:
    """Return what ``work`` returns, an answer of a process, or cancel it.

    Args:
        limit_s: on the process's own clock.
        name: of what the process does; a slow one is logged.

    Raises:
        OutOfTime: if the limit is reached.
    """
    task = asyncio.create_task(work)
    watch = _Watch(pid, limit_s, name)
    try:
        while not (await asyncio.wait({task}, timeout=watch.every_s))[0]:
            watch.look()
        return task.result()
    finally:
        task.cancel()
        await asyncio.wait({task})


def wait_for_bytes(connection: socket.socket, pid: int, limit_s: float, name: str = "") -> None:
    """Block until a process has sent something; as ``answer_within``.

    Raises:
        OutOfTime: if the limit is reached.
    """
    # select takes no descriptor above 1,023
    watch = _Watch(pid, limit_s, name)
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    while not poll.poll(1000.0 * watch.every_s):
        watch.look()


def output_within(child: subprocess.Popen[str], limit_s: float, name: str = "") -> str:
    """Wait for a process and return its output; kill it at the limit.

    Raises:
        OutOfTime: if the limit is reached, on the process's own clock.
    """
    watch = _Watch(child.pid, limit_s, name)
    while True:
        try:
            return child.communicate(timeout=watch.every_s)[0]
        except subprocess.TimeoutExpired:
            try:
                watch.look()
            except OutOfTime:
                limits.kill_tree(child.pid)
                child.communicate()
                raise


class _Watch:
    """Looks at a process until its limit, and says that it is slow. The time to the first look
    counts as its own.
    """

    def __init__(self, pid: int, limit_s: float, name: str) -> None:
        self._pid = pid
        self._limit_s = limit_s
        self._name = name
        # Most answers come before the first look.
        self._clock: WorkClock | None = None
        self._reminders = Reminders()
        self.every_s = min(limit_s / LOOKS, LONGEST_LOOK_S)

    def look(self) -> None:
        if self._clock is None:
            self._clock = WorkClock(self._pid)
            self._clock.own_s = self._clock.wall_s = self.every_s
            return
        clock = self._clock
        clock.look(2.0 * self.every_s)
        if clock.own_s >= self._limit_s:
            raise OutOfTime(f"no answer in {clock}")
        if self._name and clock.wall_s >= SLOW_AFTER_S and self._reminders.due(time.monotonic()):
            log.warning("%s is slow: no answer in %s; still waiting", self._name, clock)


def _read_clock(pid: int, states: str) -> tuple[dict[int, float], bool]:
    """Return the processor time of a process and its descendants, and whether a thread but this is
    in such a state.
    """
    cpu_s: dict[int, float] = {}
    waits = False
    for process in limits.tree(pid):
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
