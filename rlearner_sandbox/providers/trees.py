"""Copies, measures and removes folders of layers: whiteouts, opaque folders, owners, hard links."""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

# As an overlay in a user namespace marks a folder that hides the one below.
OPAQUE: Final = "user.overlay.opaque"
NOBODY: Final = 65534
MAX_UID: Final = 65535
_CHUNK: Final = 1 << 20


def walk_tree(folder: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the relative path and status of everything in a folder, parents first, in order."""
    pending = [""]
    while pending:
        relative = pending.pop()
        path = os.path.join(folder, relative) if relative else str(folder)
        try:
            status = os.lstat(path)
            is_folder = stat.S_ISDIR(status.st_mode)
            entries = sorted(os.listdir(path), reverse=True) if is_folder else []
        except FileNotFoundError:
            # A running sandbox removed it.
            continue
        yield relative, status
        pending += [os.path.join(relative, entry) for entry in entries]


@contextmanager
def opened_tree(folder: Path) -> Iterator[dict[str, int]]:
    """Let this user read what it owns in a folder; yield the modes that are restored at the end."""
    modes: dict[str, int] = {}
    if os.geteuid() != 0:
        for relative, status in _walk_opening(folder):
            kind = status.st_mode
            needed = 0o700 if stat.S_ISDIR(kind) else 0o400
            is_file = stat.S_ISDIR(kind) or stat.S_ISREG(kind)
            if is_file and kind & needed != needed and status.st_uid == os.geteuid():
                modes[relative] = stat.S_IMODE(kind)
                os.chmod(os.path.join(folder, relative), modes[relative] | needed)
    try:
        yield modes
    finally:
        for relative, mode in reversed(modes.items()):
            os.chmod(os.path.join(folder, relative), mode)


def _walk_opening(folder: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Yield what ``walk_tree`` yields; a folder is entered only after the caller had it."""
    pending = [""]
    while pending:
        relative = pending.pop()
        path = os.path.join(folder, relative)
        try:
            status = os.lstat(path)
            yield relative, status
            if stat.S_ISDIR(status.st_mode):
                pending += [os.path.join(relative, entry) for entry in os.listdir(path)]
        except OSError:
            continue


def copy_tree(source: Path, target: Path, *, uid_shift: int | None = None) -> None:
    """Copy a folder to one that does not exist.

    Args:
        uid_shift: added to each owner below 65,536, if this process may; others become nobody.
            None: owners stay as they are, if this process may keep them.
    """
    with opened_tree(source) as closed_modes:
        _copy_opened(source, target, uid_shift, closed_modes)


def _copy_opened(
    source: Path, target: Path, uid_shift: int | None, closed_modes: dict[str, int]
) -> None:
    links: dict[tuple[int, int], str] = {}
    modes: list[tuple[str, int]] = []
    is_root = os.geteuid() == 0
    for relative, status in walk_tree(source):
        path = os.path.join(source, relative) if relative else str(source)
        copy = os.path.join(target, relative) if relative else str(target)
        inode = (status.st_dev, status.st_ino)
        if inode in links:
            os.link(links[inode], copy, follow_symlinks=False)
            continue
        try:
            is_copied = _copy_entry(path, copy, status)
        except FileNotFoundError:
            continue
        if not is_copied:
            continue
        if status.st_nlink > 1 and not stat.S_ISDIR(status.st_mode):
            links[inode] = copy
        if is_root:
            os.lchown(copy, *_shifted_owner(status, uid_shift))
        if not stat.S_ISLNK(status.st_mode) and not is_whiteout(status):
            modes.append((copy, closed_modes.get(relative, stat.S_IMODE(status.st_mode))))
    for copy, mode in reversed(modes):
        os.chmod(copy, mode)


def is_whiteout(status: os.stat_result) -> bool:
    """Return whether a file stands for the removal of one of a lower layer."""
    return stat.S_ISCHR(status.st_mode) and status.st_rdev == 0


def _shifted_owner(status: os.stat_result, uid_shift: int | None) -> tuple[int, int]:
    if uid_shift is None:
        return status.st_uid, status.st_gid
    owners = (status.st_uid, status.st_gid)
    uid, gid = (owner if owner <= MAX_UID else NOBODY for owner in owners)
    return uid + uid_shift, gid + uid_shift


def _copy_entry(path: str, copy: str, status: os.stat_result) -> bool:
    kind = status.st_mode
    if stat.S_ISDIR(kind):
        os.mkdir(copy, 0o700)
        if is_opaque(path):
            os.setxattr(copy, OPAQUE, b"y")
    elif stat.S_ISLNK(kind):
        os.symlink(os.readlink(path), copy)
    elif stat.S_ISREG(kind):
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with open(os.open(path, flags), "rb") as original, open(copy, "xb") as file:
            shutil.copyfileobj(original, file, _CHUNK)
    elif is_whiteout(status):
        os.mknod(copy, stat.S_IFCHR, 0)
    else:
        # Sockets, pipes and devices say nothing without who holds them.
        return False
    return True


def is_opaque(path: str) -> bool:
    """Return whether a folder of a layer hides the folder of the layers below."""
    try:
        return os.getxattr(path, OPAQUE, follow_symlinks=False) == b"y"
    except OSError:
        return False


def tree_digest(folder: Path, *, uid_shift: int = 0) -> str:
    """Return a hash of names, kinds, modes, owners and contents, in hexadecimal digits."""
    with opened_tree(folder) as closed_modes:
        return _digest_opened(folder, uid_shift, closed_modes)


def _digest_opened(folder: Path, uid_shift: int, closed_modes: dict[str, int]) -> str:
    total = hashlib.sha256()
    for relative, status in walk_tree(folder):
        path = os.path.join(folder, relative)
        mode = closed_modes.get(relative, stat.S_IMODE(status.st_mode))
        kind = stat.S_IFMT(status.st_mode)
        parts: list[object] = [relative, kind, mode, status.st_uid - uid_shift]
        parts += [status.st_gid - uid_shift]
        if stat.S_ISLNK(status.st_mode):
            parts.append(os.readlink(path))
        elif stat.S_ISDIR(status.st_mode):
            parts.append(is_opaque(path))
        total.update(repr(parts).encode())
        if stat.S_ISREG(status.st_mode):
            try:
                with open(path, "rb") as file:
                    total.update(hashlib.file_digest(file, "sha256").digest())
            except FileNotFoundError:
                continue
    return total.hexdigest()


def tree_bytes(folder: Path) -> int:
    """Return the bytes on disk of a folder, as far as this user may look."""
    return sum(status.st_blocks * 512 for _, status in _walk_opening(folder))


def remove_tree(folder: Path) -> None:
    """Remove a folder, also one with folders that nobody may enter."""
    for relative, status in _walk_opening(folder):
        if stat.S_ISDIR(status.st_mode) and status.st_mode & 0o700 != 0o700:
            os.chmod(os.path.join(folder, relative), 0o700)
    shutil.rmtree(folder, ignore_errors=True)


def merge_layers(layers: Sequence[Path], target: Path, *, keeps_whiteouts: bool) -> None:
    """Write layers, the lowest first, over each other into a new folder.

    Args:
        keeps_whiteouts: whether the result is a layer of its own, which goes on hiding what lies
            below; else it is a whole root.
    """
    os.mkdir(target, 0o755)
    target_modes: dict[str, int] = {}
    for layer in layers:
        with opened_tree(layer) as closed_modes:
            target_modes |= _apply_layer(
                layer, target, keeps_whiteouts=keeps_whiteouts, closed_modes=closed_modes
            )
    # Last, since a folder that is closed takes no further layer.
    for path, mode in reversed(target_modes.items()):
        if os.path.lexists(path) and not os.path.islink(path):
            os.chmod(path, mode)


def _apply_layer(
    layer: Path, target: Path, *, keeps_whiteouts: bool, closed_modes: dict[str, int]
) -> dict[str, int]:
    """Write a layer over ``target``; return the modes that its files and folders are to get."""
    links: dict[tuple[int, int], str] = {}
    modes: dict[str, int] = {}
    is_root = os.geteuid() == 0
    for relative, status in walk_tree(layer):
        path = os.path.join(layer, relative) if relative else str(layer)
        copy = os.path.join(target, relative) if relative else str(target)
        is_folder = stat.S_ISDIR(status.st_mode)
        is_merged = is_folder and os.path.isdir(copy) and not os.path.islink(copy)
        if relative and os.path.lexists(copy) and (not is_merged or is_opaque(path)):
            _remove_entry(copy)
            is_merged = False
        inode = (status.st_dev, status.st_ino)
        if is_whiteout(status) and not keeps_whiteouts:
            continue
        if inode in links:
            os.link(links[inode], copy, follow_symlinks=False)
            continue
        try:
            if not is_merged and not _copy_entry(path, copy, status):
                continue
        except FileNotFoundError:
            continue
        if status.st_nlink > 1 and not is_folder:
            links[inode] = copy
        if is_root:
            os.lchown(copy, status.st_uid, status.st_gid)
        if not stat.S_ISLNK(status.st_mode) and not is_whiteout(status):
            modes[copy] = closed_modes.get(relative, stat.S_IMODE(status.st_mode))
    return modes


def _remove_entry(path: str) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        remove_tree(Path(path))
    else:
        os.unlink(path)
