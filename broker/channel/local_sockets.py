"""Sockets for processes of one host and user: ``ipc://`` files in a folder that only this user can
enter.

A socket's name is random. A file of that name in the own folder therefore shows that a server is on
this host, in this mount namespace and of this user; its presence announces the name only, never a
path.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import socket
import stat
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

log = logging.getLogger(__name__)

NAME: Final = re.compile(r"[0-9a-f]{32}")
MAX_PATH_BYTES: Final = 107  # of a socket's path, a limit of Linux
STALE_AFTER_S: Final = 60.0  # a socket that is younger may have no listener yet
MAX_SWEPT: Final = 1000


class UnsafeFolder(Exception):
    """The folder cannot be used: another user owns it, or others can enter or replace it."""


def socket_folder() -> Path:
    """Return the folder of this user's sockets: ``$XDG_RUNTIME_DIR/rlearner``, else
    ``rlearner-UID`` in /tmp.

    Raises:
        UnsafeFolder: if it is not this user's alone, or cannot be created.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    path = Path(tempfile.gettempdir()) / f"rlearner-{os.geteuid()}"
    if runtime.startswith("/") and _is_own(runtime):
        path = Path(runtime) / "rlearner"
    try:
        path.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise UnsafeFolder(f"cannot create {path}: {error.strerror}") from None
    if not _is_own(path):
        raise UnsafeFolder(f"{path} must be a folder of this user's with mode 0700")
    return path


def new_name() -> str:
    """Return a random name for a socket."""
    return secrets.token_hex(16)


def path_of(name: str) -> str:
    """Return the path of a socket in the folder.

    Raises:
        UnsafeFolder: if the folder cannot be used, or the path is too long for a socket.
    """
    path = str(socket_folder() / name)
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        raise UnsafeFolder(f"{path} is longer than {MAX_PATH_BYTES} bytes, too long for a socket")
    return path


def find_socket(name: str) -> str:
    """Return the path of a server's socket if it is on this host and of this user, else an empty
    text.
    """
    if not NAME.fullmatch(name):
        return ""
    try:
        path = path_of(name)
        status = os.lstat(path)
    except (UnsafeFolder, OSError):
        return ""
    return path if stat.S_ISSOCK(status.st_mode) and status.st_uid == os.geteuid() else ""


def remove_dead_sockets() -> None:
    """Delete the sockets of servers that were killed: those that refuse connections."""
    with suppress(UnsafeFolder, OSError):
        for index, entry in enumerate(os.scandir(socket_folder())):
            if index == MAX_SWEPT:
                return
            if NAME.fullmatch(entry.name) and _is_dead(entry):
                with suppress(FileNotFoundError):
                    os.unlink(entry.path)


def _is_dead(entry: os.DirEntry[str]) -> bool:
    try:
        status = entry.stat(follow_symlinks=False)
        if not stat.S_ISSOCK(status.st_mode) or time.time() - status.st_mtime < STALE_AFTER_S:
            return False
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.setblocking(False)
            probe.connect(entry.path)
    except ConnectionRefusedError:
        return True
    except OSError:  # busy, or gone in the meantime
        return False
    return False


def _is_own(path: str | Path) -> bool:
    """Return whether a path is a folder, not a link, that only this user can enter."""
    try:
        status = os.lstat(path)
    except OSError:
        return False
    return (
        stat.S_ISDIR(status.st_mode)
        and status.st_uid == os.geteuid()
        and not status.st_mode & 0o077
    )
