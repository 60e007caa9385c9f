"""Share of a host's processors that is in use."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

# In a container, the files of its own control group.
CGROUP: Final = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class _CpuTimes:
    at: float
    busy_s: float  # of the cores that this container may use, by all processes of the host
    total_s: float
    own_s: float  # of this container


class ProcessorUse:
    """Processor use of this host between two calls, or of its container if that has limits.

    Args:
        cgroup: folder of the container's control group (v2).
    """

    def __init__(self, cgroup: Path = CGROUP) -> None:
        self._cgroup = cgroup
        self._last = self._read()

    def figures(self) -> dict[str, float]:
        """Return ``host/cores`` and ``host/cpu_busy``, the share in use since the last call; empty
        if that is not known.
        """
        before = self._last
        self._last = now = self._read()
        cores = self.num_cores()
        if now.total_s <= before.total_s:
            return {}
        busy = (now.busy_s - before.busy_s) / (now.total_s - before.total_s)
        if cores < len(self._cores()):
            # Other containers leave cores idle that this one must not use.
            own = (now.own_s - before.own_s) / max(now.at - before.at, 1e-9) / cores
            busy = max(busy, own)
        return {"host/cores": cores, "host/cpu_busy": min(1.0, max(0.0, busy))}

    def num_cores(self) -> float:
        """Return the cores that this host, or its container, may use at once."""
        quota = self._quota()
        cores = float(len(self._cores()))
        return min(quota, cores) if quota > 0 else cores

    def _read(self) -> _CpuTimes:
        busy_s = 0.0
        total_s = 0.0
        times = psutil.cpu_times(percpu=True)
        for core in self._cores():
            # Time of guests is part of user and nice.
            core_times = times[core]
            guests = getattr(core_times, "guest", 0.0) + getattr(core_times, "guest_nice", 0.0)
            core_s = sum(core_times) - guests
            total_s += core_s
            busy_s += core_s - core_times.idle - getattr(core_times, "iowait", 0.0)
        return _CpuTimes(time.monotonic(), busy_s, total_s, self._own_s())

    def _cores(self) -> list[int]:
        """Return the numbers of the cores that this container may use."""
        cores = range(psutil.cpu_count() or 1)
        with suppress(OSError, ValueError):
            text = (self._cgroup / "cpuset.cpus.effective").read_text(encoding="ascii").strip()
            allowed: set[int] = set()
            for part in text.split(","):
                first, _, last = part.partition("-")
                allowed.update(range(int(first), int(last or first) + 1))
            return [core for core in cores if core in allowed] or list(cores)
        return list(cores)

    def _quota(self) -> float:
        """Return the cores whose time the container may use; 0 without a limit."""
        with suppress(OSError, ValueError):
            quota, period = (self._cgroup / "cpu.max").read_text(encoding="ascii").split()
            return int(quota) / int(period)
        return 0.0

    def _own_s(self) -> float:
        with suppress(OSError, ValueError):
            for line in (self._cgroup / "cpu.stat").read_text(encoding="ascii").splitlines():
                name, _, value = line.partition(" ")
                if name == "usage_usec":
                    return int(value) / 1e6
        return 0.0
