"""Measure the processor share of processes that do not belong to a run."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import Final

import psutil

NEVER_QUIET: Final = "nothing was measured: other processes took their share of the processors all the time; see --others"


class OtherLoad:
    """Counts from its making, then from call to call; this process and all its descendants are the
    run.

    A descendant that ended since the last call counts to the others from then on.
    """

    def __init__(self) -> None:
        self._before = _look()

    def share(self) -> float:
        """Return the processor time of other processes as a share of all processors."""
        (at, busy_s, own_s), self._before = self._before, _look()
        now_at, now_busy_s, now_own_s = self._before
        taken_s = (now_busy_s - busy_s) - (now_own_s - own_s)
        return max(0.0, taken_s / ((now_at - at) * (psutil.cpu_count() or 1)))


def take_priority() -> None:
    """Give this process and its descendants nearly all of the processors that they want, before
    those of others.

    Raises:
        OSError: if this is not Linux, or not root.
    """
    own = psutil.Process()
    for process in [own, *own.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess, FileNotFoundError):
            Path(f"/proc/{process.pid}/autogroup").write_text("-20")


def _look() -> tuple[float, float, float]:
    """Return the time, and the busy seconds of all processors and of this run."""
    return time.monotonic(), _busy_s(), _own_s()


def _busy_s() -> float:
    times = psutil.cpu_times()
    idle = times.idle + sum(getattr(times, name, 0.0) for name in ("iowait", "guest", "guest_nice"))
    return float(sum(times) - idle)


def _own_s() -> float:
    own = psutil.Process()
    found = 0.0
    for process in [own, *own.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            found += times.user + times.system
    return found
