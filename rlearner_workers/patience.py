"""Waits for a process within a limit on its own clock, and says when it is slow.

See ``broker.system.work_clock``: a loaded machine must not end a start or a call that would end
well.
"""

from __future__ import annotations

import asyncio
import logging
import select
import socket
import subprocess
import time
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

from broker.errors import RlearnerError
from broker.system.process_tree import kill_tree
from broker.system.reminders import Reminders
from broker.system.work_clock import WorkClock

log = logging.getLogger(__name__)

LONGEST_LOOK_S: Final = 5.0  # between two looks; all threads of all descendants are read
LOOKS: Final = 10  # within a limit
SLOW_AFTER_S: Final = 15.0

A = TypeVar("A")


class OutOfTime(RlearnerError):
    """A process has used its time."""


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
                kill_tree(child.pid)
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
