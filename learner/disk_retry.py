"""Retries writes to a folder that is full or not writable for a while."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TypeVar

from broker.errors import UserError
from broker.runtime.process import Stop
from broker.system.recent_warning import forget_warning
from broker.system.reminders import Reminders

log = logging.getLogger(__name__)

T = TypeVar("T")

FIRST_WAIT_S: Final = 0.5
# A freed disk must not keep training waiting for long.
LONGEST_WAIT_S: Final = 10.0


class RetryBackoff:
    """Waiting times after failures in a row, and when to report them. Pure."""

    def __init__(self) -> None:
        self._wait_s = FIRST_WAIT_S
        self._reason = ""
        self._reminders = Reminders()

    def failed(self, reason: str, now: float) -> tuple[float, bool]:
        """Count a failure; return the seconds until the next try, and whether to report it."""
        if reason != self._reason:
            self._reason = reason
            self._reminders.over()
        is_due = self._reminders.due(now)
        wait_s = self._wait_s
        self._wait_s = min(2 * self._wait_s, LONGEST_WAIT_S)
        return wait_s, is_due

    def worked(self) -> None:
        """Reset the waiting time after a successful try."""
        self._wait_s = FIRST_WAIT_S


class DiskRetry:
    """Retrier of jobs that write to a folder, until they succeed.

    Args:
        folder: named in messages.
        stop: ends a wait.
        waits: what is blocked while it waits, for users.
        say: receives a text while it waits, and an empty one afterwards.
    """

    def __init__(
        self, folder: Path, stop: Stop, waits: str, say: Callable[[str], None] = lambda _: None
    ) -> None:
        self._folder = folder
        self._stop = stop
        self._waits = waits
        self._say = say
        self.reason = ""  # why the folder cannot be written at present, empty if it can
        self._backoff = RetryBackoff()

    async def __call__(self, job: Callable[[], Awaitable[T]]) -> T:
        """Return the result of a job that may be repeated.

        Raises:
            UserError: if a stop is requested while the job fails.
        """
        started_at = time.monotonic()
        is_reported = False
        while True:
            try:
                result = await job()
            # Users can fix a full disk or a lost mount, after which the run continues.
            except OSError as error:
                self.reason = reason_of(error, self._folder)
                if self._stop.asked.is_set():
                    raise UserError(f"{self.reason}; asked to stop") from None
                wait_s, is_due = self._backoff.failed(str(error.errno), time.monotonic())
                is_reported = is_reported or is_due
                if is_due:
                    log.error("%s; %s until it can be written", self.reason, self._waits)
                    self._say(f"{self.reason}; {self._waits}")
            else:
                if is_reported:
                    log.warning(
                        "%s: can be written again, after %.1f s",
                        self._folder,
                        time.monotonic() - started_at,
                    )
                    forget_warning(log)
                    self._say("")
                self._backoff.worked()
                self.reason = ""
                return result
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stop.asked.wait(), wait_s)

    async def in_thread(self, job: Callable[..., T], *args: Any) -> T:
        """Run a blocking job in a thread, with the same retries."""
        return await self(lambda: asyncio.to_thread(job, *args))


def reason_of(error: OSError, folder: Path) -> str:
    """Return one line: the folder, the operating system's error, and the free space."""
    text = f"{folder}: {error.strerror or error}"
    with suppress(OSError):
        filesystem = os.statvfs(folder)
        text += f" ({filesystem.f_bavail * filesystem.f_frsize / 2**20:.0f} MiB free)"
    return text
