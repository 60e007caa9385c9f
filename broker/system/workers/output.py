"""Logs what worker processes print, up to a limit per minute; the rest is read and dropped."""

from __future__ import annotations

import logging
import os
import threading
import time
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
    """A pipe that any number of processes write to.

    Attributes:
        file: the end to write to, for ``broker.system.children.spawn``.
        dropped: bytes that were not logged.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._end, theirs = os.pipe()
        self.file: IO[bytes] = os.fdopen(theirs, "wb", buffering=0)
        self.dropped = 0
        self._left = BUDGET_BYTES
        self._full_again = time.monotonic() + REFILL_S
        threading.Thread(target=self._read, name="worker-output", daemon=True).start()

    def close(self) -> None:
        """Close this end; output of other processes is read until they end."""
        self.file.close()

    def _read(self) -> None:
        with open(os.devnull, "wb", buffering=0) as nowhere:
            try:
                while self._drop(nowhere) if self._spent() else self._log():
                    pass
            finally:
                os.close(self._end)

    def _spent(self) -> bool:
        now = time.monotonic()
        if now >= self._full_again:
            self._left = BUDGET_BYTES
            self._full_again = now + REFILL_S
        return self._left <= 0

    def _log(self) -> int:
        data = os.read(self._end, CHUNK_BYTES)
        for line in data.decode("utf-8", "replace").splitlines():
            if self._left <= 0:
                break
            if text := line.strip()[:LINE_CHARS]:
                self._left -= len(text) + LINE_COSTS
                log.info("%s prints: %s", self._name, text)
        if self._left <= 0:
            log.warning("%s prints too much: dropped for up to %g s", self._name, REFILL_S)
        return len(data)

    def _drop(self, nowhere: IO[bytes]) -> int:
        """Drop output without copying it: a gigabyte costs the hub next to nothing."""
        count = os.splice(self._end, nowhere.fileno(), DROP_BYTES)
        self.dropped += count
        return count
