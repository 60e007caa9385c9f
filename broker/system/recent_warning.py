"""Keeps the newest warning or error that this process logged, for its presence."""

from __future__ import annotations

import logging
import time
from typing import Final

MAX_CHARS: Final = 300
FOR_S: Final = 600.0


class RecentWarning(logging.Handler):
    """A handler of the root logger that keeps the newest WARNING or ERROR."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._newest: tuple[float, str] | None = None  # when, and the line
        self._logger = ""  # that wrote it

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the record's message."""
        try:
            at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
            text = f"{at} {record.levelname} {' '.join(record.getMessage().split())}"
            # a lone surrogate has no encoding
            self._newest = record.created, text.encode("utf-8", "replace").decode()[:MAX_CHARS]
            self._logger = record.name
        # Arguments may not fit their format; every logging handler reports that and goes on.
        except Exception:  # noqa: BLE001
            self.handleError(record)

    def forget(self, logger: str) -> None:
        """Forget the newest if this logger wrote it."""
        if logger == self._logger:
            self._newest = None

    def line(self, now: float) -> str:
        """Return the newest with its time, 300 characters; empty without one in 10 minutes.

        Args:
            now: unix seconds.
        """
        newest = self._newest
        return newest[1] if newest is not None and now - newest[0] <= FOR_S else ""


def forget_warning(log: logging.Logger) -> None:
    """Forget the newest warning of a logger: what it warned of is over."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, RecentWarning):
            handler.forget(log.name)
