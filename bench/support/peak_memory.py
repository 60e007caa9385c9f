"""The most anonymous memory that this process has had for a while."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Final

EVERY_S: Final = 0.005


class PeakMemory:
    """Anonymous resident memory of this process, sampled in a thread. MiB.

    Attributes:
        idle: at the beginning.
        most: since then.
    """

    def __enter__(self) -> PeakMemory:
        self.idle = self.most = anonymous_mib()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def _sample(self) -> None:
        while not self._done.wait(EVERY_S):
            self.most = max(self.most, anonymous_mib())

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()


def anonymous_mib() -> float:
    """Return the anonymous resident memory of this process in MiB."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:")) / 1024
