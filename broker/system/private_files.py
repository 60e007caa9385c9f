"""Makes files that only this user can read, whatever the umask; replaces them durably.

A run's folder holds prompts, logs and weights, and its processes load what is in it. So modes are
explicit, links of other users are refused, and temporary names cannot be guessed.
"""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from broker.errors import UserError

PRIVATE_UMASK: Final = 0o077
SUFFIX: Final = ".new"  # of a file that is not complete yet
_AT_FDCWD: Final = -100
_RENAME_EXCHANGE: Final = 2
_RENAMEAT2: Final = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)  # glibc 2.28


@contextmanager
def private_umask() -> Iterator[None]:
    """Keep what this process and its children create from other users; every command runs in it."""
    old_umask = os.umask(PRIVATE_UMASK)
    try:
        yield
    finally:
        os.umask(old_umask)


def private_folder(path: Path) -> Path:
    """Make a folder private, or an existing one, and return its path.

    Raises:
        UserError: if it, or the link at its place, belongs to another user, or everyone could write
            to it.
        OSError: if it cannot be made.
    """
    if not path.is_dir():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
    refuse_foreign_link(path)
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        status = os.fstat(folder)
        if status.st_uid != os.geteuid():
            raise UserError(
                f"{path} belongs to another user (uid {status.st_uid}); name a folder of yours"
            )
        if status.st_mode & stat.S_IWOTH:
            raise UserError(
                f"{path} can be written by every user; check its contents, then run chmod 700 "
                f"{path}"
            )
        if stat.S_IMODE(status.st_mode) != 0o700:
            os.fchmod(folder, 0o700)
    finally:
        os.close(folder)
    return path


def is_open_to_others(status: os.stat_result) -> bool:
    """Return whether other users can use a file with a secret.

    As in PostgreSQL, a group may read root's: Debian keeps TLS keys that way, and Kubernetes mounts
    secrets that way for processes that are not root.
    """
    group = stat.S_IWGRP | stat.S_IXGRP if status.st_uid == 0 else stat.S_IRWXG
    return bool(status.st_mode & (stat.S_IRWXO | group))


def refuse_foreign_link(path: Path) -> None:
    """Accept a symbolic link only if this user or root made it.

    Raises:
        UserError: if another user made it.
        OSError: if there is nothing of that name.
    """
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode) and status.st_uid not in (0, os.geteuid()):
        raise UserError(f"{path} is a link that another user (uid {status.st_uid}) made; remove it")


def open_private(path: Path, flags: int) -> int:
    """Open or create a file that only this user can read, and return its descriptor.

    Args:
        flags: as for ``os.open``. A file that exists may be a device or a pipe of another user,
            such as a terminal.

    Raises:
        UserError: if the file, or a link at its place, belongs to another user.
        OSError: if it cannot be opened.
    """
    flags |= os.O_CLOEXEC
    try:
        file = os.open(path, flags | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        # others cannot replace it afterwards: its folder is ours, or sticky
        refuse_foreign_link(path)
        file = os.open(path, flags, 0o600)
    try:
        status = os.fstat(file)
        if stat.S_ISREG(status.st_mode):
            if status.st_uid != os.geteuid():
                raise UserError(
                    f"{path} belongs to another user (uid {status.st_uid}); name a file of yours"
                )
            if status.st_mode & PRIVATE_UMASK:
                os.fchmod(file, status.st_mode & 0o700)
    except BaseException:
        os.close(file)
        raise
    return file


def private_write(path: Path, data: bytes | memoryview) -> None:
    """Replace a file: readers and crashes see all of the old content or all of the new.

    Raises:
        OSError: if it cannot be written; the old file stays.
    """
    with draft_of(path) as draft:
        draft.write_bytes(data)


@contextmanager
def draft_of(path: Path) -> Iterator[Path]:
    """Yield an empty private file next to ``path``, which it replaces when the block ends.

    If the block raises, the draft is removed.

    Raises:
        OSError: if it cannot be written.
    """
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}{SUFFIX}")
    os.close(
        os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    )
    try:
        yield draft
        # A library may have put a file of its own there.
        draft.chmod(0o600)
        sync(draft)
        replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def replace(source: Path, target: Path) -> None:
    """Rename within one folder, over an existing file or folder, and survive a power loss."""
    os.replace(source, target)
    sync(target.parent)


def exchange(path: Path, other_path: Path) -> None:
    """Swap the names of two folders or files at once, durably (Linux).

    Raises:
        OSError: if they cannot be swapped; the kernel or the file system may not be able to.
    """
    if _RENAMEAT2 is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    if _RENAMEAT2(
        _AT_FDCWD, os.fsencode(path), _AT_FDCWD, os.fsencode(other_path), _RENAME_EXCHANGE
    ):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(path))
    sync(other_path.parent)


def sync(path: Path) -> None:
    """Flush a file's bytes, or a folder's names, to disk."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
