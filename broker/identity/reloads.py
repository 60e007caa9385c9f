"""Makes a nats-server of this machine read its configuration again, and waits until it has.

A server that meets an account for the first time at a reload gives it no services until the next
reload (nats-server 2.15.1: ``configureAccounts`` starts them for new accounts only when the server
starts). So it is told twice.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

log = logging.getLogger(__name__)

WITHIN_S: Final = 10.0  # a busy machine takes seconds for what takes a free one 20 ms
LOOK_EVERY_S: Final = 0.005
READ: Final = b"Reloaded server configuration"
REFUSED: Final = b"Failed to reload server configuration"


def reload_server(pid: int, server_log: Path, *, has_new_accounts: bool) -> None:
    """Signal a server, and return once its log says that it has read its configuration.

    Args:
        has_new_accounts: whether the configuration has accounts that the server has not read
            before.

    Raises:
        ProcessLookupError, PermissionError: if there is no such process, or it is of another user.
    """
    for _ in range(2 if has_new_accounts else 1):
        start = _file_size(server_log)
        os.kill(pid, signal.SIGHUP)
        deadline = time.monotonic() + WITHIN_S
        while not _has_read(server_log, start):
            if time.monotonic() > deadline:
                log.warning(
                    "nats-server (pid %d) did not read its configuration within %g s", pid, WITHIN_S
                )
                return
            os.kill(pid, 0)
            time.sleep(LOOK_EVERY_S)


def _has_read(server_log: Path, start: int) -> bool:
    """Return whether the server says so behind a position of its log, which may have been rotated
    since.
    """
    with suppress(FileNotFoundError), server_log.open("rb") as file:
        file.seek(start if start <= os.fstat(file.fileno()).st_size else 0)
        text = file.read()
        if REFUSED in text:
            log.error(
                "%s: %s",
                server_log,
                text[text.index(REFUSED) :].splitlines()[0].decode(errors="replace"),
            )
        return READ in text or REFUSED in text
    return False


def _file_size(file: Path) -> int:
    with suppress(FileNotFoundError):
        return file.stat().st_size
    return 0
