"""A file lock that one process can hold; the kernel releases it when the process ends."""

from __future__ import annotations

import fcntl
import time
from pathlib import Path
from typing import IO

from broker.errors import UserError


def lock(file: Path, problem: str, wait_s: float = 0.0) -> IO[bytes]:
    """Lock a file until it is closed, and return it; a child that inherits it holds it too.

    Args:
        problem: the error message if another process holds it.
        wait_s: how long to wait for another process that is ending.

    Raises:
        UserError: if it is held.
    """
    opened = file.open("ab")
    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                opened.close()
                raise UserError(problem) from None
            time.sleep(0.05)
        else:
            return opened
