"""Logs what worker processes print, up to a limit per minute; the rest is read and dropped."""

from __future__ import annotations

import logging
import os
import threading
import time
from functools import cached_property
from typing import IO, Final

log = logging.getLogger(__name__)

# Logged per minute, including the markup of the log.
BUDGET_BYTES: Final = 64 << 10
REFILL_S: Final = 60.0
LINE_CHARS: Final = 500
LINE_COSTS: Final = 100  # bytes of markup
CHUNK_BYTES: Final = 64 << 10
DROP_BYTES: Final = 1 << 20


class WorkerOutput:
    """A pipe that any number of processes write to; opened when it is first used.

    Attributes:
        dropped: bytes that were not logged.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.dropped = 0
        self._left = BUDGET_BYTES
        self._full_again = time.monotonic() + REFILL_S

    @cached_property
    def file(self) -> IO[bytes]:
        """The end to write to, for ``broker.system.children.spawn``."""
        ours, theirs = os.pipe()
        threading.Thread(target=self._read, args=(ours,), name="worker-output", daemon=True).start()
        return os.fdopen(theirs, "wb", buffering=0)

    def close(self) -> None:
        """Close this end; output of other processes is read until they end."""
        if "file" in vars(self):
            self.file.close()

    def _read(self, end: int) -> None:
        with open(os.devnull, "wb", buffering=0) as nowhere:
            try:
                while self._drop(end, nowhere) if self._spent() else self._log(end):
                    pass
            finally:
                os.close(end)

    def _spent(self) -> bool:
        now = time.monotonic()
        if now >= self._full_again:
            self._left = BUDGET_BYTES
            self._full_again = now + REFILL_S
        return self._left <= 0

    def _log(self, end: int) -> int:
        data = os.read(end, CHUNK_BYTES)
        for line in data.decode("utf-8", "replace").splitlines():
            if self._left <= 0:
                break
            if text := line.strip()[:LINE_CHARS]:
                self._left -= len(text) + LINE_COSTS
                log.info("%s prints: %s", self._name, text)
        if self._left <= 0:
            log.warning("%s prints too much: dropped for up to %g s", self._name, REFILL_S)
        return len(data)

    def _drop(self, end: int, nowhere: IO[bytes]) -> int:
        """Drop output without copying it: a gigabyte costs the hub next to nothing."""
        count = os.splice(end, nowhere.fileno(), DROP_BYTES)
        self.dropped += count
        return count
