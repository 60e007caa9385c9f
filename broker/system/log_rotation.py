"""Rotates logs by size: ``hub.log`` becomes ``hub.log.1``, that ``hub.log.2``, up to ``hub.log.3``.

The process that writes a log rotates it, between two of its own lines, so none is lost.
"""

from __future__ import annotations

import logging
import os
import stat
from contextlib import suppress
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from typing import Final

MAX_OLD_FILES: Final = 3  # older files
# Environment variable: MiB of a file, 64 by default.
SIZE: Final = "RL_LOG_MIB"
# environment variable that `rlearner up` sets: the file behind stdout and stderr
OUTPUT: Final = "RL_LOG_OUTPUT"
DEFAULT_MIB: Final = 64.0


def limit_bytes() -> int:
    """Return the size at which a log is rotated."""
    try:
        mib = float(os.environ.get(SIZE, ""))
    except ValueError:
        mib = DEFAULT_MIB
    return int((mib if mib > 0 else DEFAULT_MIB) * (1 << 20))


def rotate(path: str) -> None:
    """Rename a log and its older files, dropping the oldest."""
    for number in range(MAX_OLD_FILES - 1, 0, -1):
        with suppress(FileNotFoundError):
            os.replace(f"{path}.{number}", f"{path}.{number + 1}")
    with suppress(FileNotFoundError):
        os.replace(path, f"{path}.1")


def rotate_output() -> None:
    """Rotate the file behind stdout and stderr if it is too large and ``up`` opened it.

    Children that write to it directly keep the old file.
    """
    path = os.environ.get(OUTPUT)
    if not path:
        return
    with suppress(OSError):
        behind = os.fstat(2)
        if behind.st_size < limit_bytes() or not stat.S_ISREG(behind.st_mode):
            return
        status = os.stat(path, follow_symlinks=False)
        if (status.st_dev, status.st_ino) != (behind.st_dev, behind.st_ino):
            # A parent's file, not this process's.
            return
        rotate(path)
        fresh = os.open(
            path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
        )
        try:
            for descriptor in (1, 2):
                os.dup2(fresh, descriptor)
        finally:
            os.close(fresh)


class PrivateLogFile(RotatingFileHandler):
    """Appends to a log file that only this user can read, and rotates it.

    If another process rotated the file (one with the same file, or logrotate), it continues in the
    new one.

    Raises:
        OSError: if it cannot be written.
    """

    def __init__(self, path: str) -> None:
        super().__init__(path, maxBytes=limit_bytes(), backupCount=MAX_OLD_FILES, encoding="utf-8")

    def shouldRollover(self, record: logging.LogRecord) -> bool:
        """Return whether the file is full; reopen it first if another has its name."""
        if self.stream is not None and not self._is_current(self.stream):
            self.stream.close()
            self.stream = self._open()
        return bool(super().shouldRollover(record))

    def _is_current(self, stream: TextIOWrapper) -> bool:
        try:
            status = os.stat(self.baseFilename)
            behind = os.fstat(stream.fileno())
        except OSError:
            return False
        return (status.st_dev, status.st_ino) == (behind.st_dev, behind.st_ino)

    def _open(self) -> TextIOWrapper:
        file = super()._open()
        with suppress(OSError):  # another user's
            if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                os.fchmod(file.fileno(), 0o600)
        return file
