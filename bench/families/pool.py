"""Runs jobs in forked processes, a few at a time: an error, a crash or a hang costs one cell.

A child is a fork of a process that has imported everything, so that it starts at once and leaves
nothing behind.
"""

from __future__ import annotations

import os
import resource
import selectors
import signal
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

CPU_S: Final = 60  # processor time of a cell, so that a busy machine changes no verdict
CELL_S: Final = 900.0  # for a cell that waits for ever
Run = Callable[["Job", str], dict[str, Any]]  # of a job and the name of its cell
Crashed = Callable[["Job", str, str], dict[str, Any]]  # likewise, and how the child ended


@dataclass
class Job:
    """Cells of one family that run in one process, in order.

    Attributes:
        subject: what they are about.
        cells: those that have not been run yet.
    """

    subject: Any
    cells: list[str]
    state: dict[str, Any] = field(default_factory=dict)  # what cells share, in the child


@dataclass
class _Child:
    job: Job
    pid: int
    pipe: int
    deadline: float
    buffer: bytes = b""


def run_jobs(
    jobs: Sequence[Job], run: Run, crashed: Callable[[Job, str, str], dict[str, Any]], size: int
) -> Iterator[dict[str, Any]]:
    """Yield the answer of every cell as it comes.

    Args:
        run: called in a child.
        crashed: makes the answer for a cell in which the child died, given the reason.
        size: processes at a time.
    """
    waiting = deque(jobs)
    selector = selectors.DefaultSelector()
    running = 0
    try:
        while waiting or running:
            while waiting and running < size:
                child = _fork(waiting.popleft(), run)
                selector.register(child.pipe, selectors.EVENT_READ, child)
                running += 1
            for key, _ in selector.select(timeout=1.0):
                child = key.data
                data = os.read(child.pipe, 1 << 16)
                yield from _answers(child, data)
                if not data:
                    selector.unregister(child.pipe)
                    running -= 1
                    yield from _buried(child, waiting, crashed)
            for key in list(selector.get_map().values()):
                if time.monotonic() > key.data.deadline:
                    os.kill(key.data.pid, signal.SIGKILL)
                    key.data.deadline = time.monotonic() + CELL_S
    finally:
        for key in list(selector.get_map().values()):
            os.kill(key.data.pid, signal.SIGKILL)
            os.waitpid(key.data.pid, 0)
        selector.close()


def _answers(child: _Child, data: bytes) -> Iterator[dict[str, Any]]:
    *lines, child.buffer = (child.buffer + data).split(b"\n")
    for line in lines:
        answer = msgspec.json.decode(line)
        child.job.cells.remove(answer["cell"])
        child.deadline = time.monotonic() + CELL_S
        yield answer


def _buried(
    child: _Child, waiting: deque[Job], crashed: Callable[[Job, str, str], dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """Reap a child; run what it has left over in another one, but for the cell in which it died."""
    os.close(child.pipe)
    status = os.waitpid(child.pid, 0)[1]
    if not child.job.cells:
        return
    signaled = os.WIFSIGNALED(status)
    how = (
        f"signal {os.WTERMSIG(status)}"
        if signaled
        else f"exit code {os.waitstatus_to_exitcode(status)}"
    )
    if signaled and os.WTERMSIG(status) == signal.SIGXCPU:
        how = f"more than {CPU_S} s of processor time"
    yield crashed(child.job, child.job.cells.pop(0), f"its process ended with {how}")
    if child.job.cells:
        waiting.append(child.job)


def _fork(job: Job, run: Run) -> _Child:
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        # of threads, which the child does not use
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid:
        os.close(writing)
        return _Child(job, pid, reading, time.monotonic() + CELL_S)
    code = 1
    try:
        os.close(reading)
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        for cell in list(job.cells):
            usage = resource.getrusage(resource.RUSAGE_SELF)
            limit = int(usage.ru_utime + usage.ru_stime) + CPU_S
            # then SIGXCPU ends it
            resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))
            os.write(writing, msgspec.json.encode(run(job, cell)) + b"\n")
        code = 0
    except BaseException:  # noqa: BLE001 - the parent sees that it ended
        traceback.print_exc()
    finally:
        os._exit(code)
