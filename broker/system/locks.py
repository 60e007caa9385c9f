"""A file that one process at a time may hold; the kernel lets go of it when that process ends, however it ends."""

from __future__ import annotations

import fcntl
import time
from pathlib import Path
from typing import IO

from broker.errors import UserError


def lock(file: Path, problem: str, wait_s: float = 0.0) -> IO[bytes]:
    """The file, locked until it is closed; a child that inherits it holds it too.

    Args:
        problem: what to say where another process holds it.
        wait_s: for another one that is ending.

    Raises:
        UserError: it is held.
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
