"""Limits the resources of worker processes, and describes how they ended (Linux)."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
from pathlib import Path
from typing import Final

from broker.system.process_tree import MIB, resident_mib

# of 1000: out of memory, the kernel kills a worker before the hub or the learner
_FIRST_TO_GO: Final = "500"


def be_expendable() -> None:
    """In a worker: write no core dumps, and be killed first when memory runs out."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_FIRST_TO_GO, encoding="ascii")


class ResourceLimits:
    """In a worker: limits the memory of this process, and tells when to replace it.

    Args:
        memory_mib: allowed beyond the present use, None: no limit. Each child process may use as
            much; the hub watches the sum over all of them.
    """

    def __init__(self, memory_mib: int | None) -> None:
        self._half_mib = (
            float("inf") if memory_mib is None else resident_mib([os.getpid()]) + memory_mib / 2
        )
        if memory_mib is not None:
            most = _data_bytes() + memory_mib * MIB
            hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
            soft = most if hard == resource.RLIM_INFINITY else min(most, hard)
            resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))

    def spent(self) -> bool:
        """Return whether more than half is used: a fresh process avoids failures caused by earlier
        calls.
        """
        return resident_mib([os.getpid()]) > self._half_mib


def _data_bytes() -> int:
    """Return the memory that counts towards RLIMIT_DATA, which is private and writable."""
    for line in (
        Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    ):
        if line.startswith("VmData:"):
            return int(line.split()[1]) * 1024
    return 0


def how_ended(status: int) -> str:
    """Describe an exit code of ``subprocess``."""
    if status < 0:
        return f"died by {signal.Signals(-status).name}"
    return f"ended with exit code {status}"


def too_much(used_mib: float, memory_mib: int) -> str:
    """Describe why a process was killed."""
    return f"was killed: it took {used_mib:.0f} MiB, the limit is {memory_mib}"
