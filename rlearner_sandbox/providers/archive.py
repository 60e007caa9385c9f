"""Copies files and folders as a stream of tar, into a sandbox and out of it.

Every member is called ``root`` or ``root/…``. What comes out of a sandbox is not trusted: only
regular files and folders are written, with names that stay below the target.
"""

from __future__ import annotations

import os
import stat
import tarfile
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import IO, Final

ROOT: Final = "root"
MAX_MEMBERS: Final = 200_000
_CHUNK: Final = 1 << 20
_DIRECTORY: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def write_archive(source: str, stream: IO[bytes], *, links: bool) -> None:
    """Write a file or folder to ``stream``.

    Args:
        links: whether symbolic links are written as such; else they are left out. Sockets, pipes
            and devices are always left out. ``source`` itself may be a link, which is followed.
    """
    with tarfile.open(fileobj=stream, mode="w|", format=tarfile.PAX_FORMAT) as archive:
        for name, path in _walk(os.path.realpath(source)):
            _write_member(archive, name, path, links=links)


def _walk(source: str) -> Iterator[tuple[str, str]]:
    pending = [(ROOT, source)]
    while pending:
        name, path = pending.pop()
        is_folder = stat.S_ISDIR(os.lstat(path).st_mode) if name == ROOT else _is_folder(path)
        yield name, path
        if is_folder:
            try:
                entries = sorted(os.listdir(path), reverse=True)
            except OSError:
                continue
            pending += [(f"{name}/{entry}", os.path.join(path, entry)) for entry in entries]


def _is_folder(path: str) -> bool:
    return os.path.isdir(path) and not os.path.islink(path)


def _write_member(archive: tarfile.TarFile, name: str, path: str, *, links: bool) -> None:
    member = tarfile.TarInfo(name)
    try:
        status = os.lstat(path)
        member.mode = stat.S_IMODE(status.st_mode)
        member.mtime = int(status.st_mtime)
        if stat.S_ISLNK(status.st_mode):
            if links:
                member.type = tarfile.SYMTYPE
                member.linkname = os.readlink(path)
                archive.addfile(member)
        elif stat.S_ISDIR(status.st_mode):
            member.type = tarfile.DIRTYPE
            archive.addfile(member)
        elif stat.S_ISREG(status.st_mode):
            _write_file(archive, member, path)
    except FileNotFoundError:
        # Another process has removed it.
        return


def _write_file(archive: tarfile.TarFile, member: tarfile.TarInfo, path: str) -> None:
    with open(os.open(path, _DIRECTORY), "rb") as file:
        status = os.fstat(file.fileno())
        # Somebody may have put another kind of file in its place.
        if stat.S_ISREG(status.st_mode):
            member.size = status.st_size
            archive.addfile(member, _Padded(file))


class _Padded:
    """Reads zeros behind a file's end, since a file may shrink while it is copied."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        return data + bytes(size - len(data)) if size >= 0 else data


def read_archive(
    stream: IO[bytes], target: str, *, trusted: bool, max_bytes: int | None = None
) -> None:
    """Write the members of an archive to ``target`` and below it.

    Args:
        trusted: whether links and modes are taken as they are. Else links are left out, and so are
            the bits for other users' privileges.
        max_bytes: most bytes of all files together.

    Raises:
        FileNotFoundError: if the archive has no member.
        ValueError: if it has more than ``max_bytes`` or 200,000 members, or is not valid.
    """
    total = 0
    count = 0
    folders: list[tuple[str, int]] = []
    try:
        with tarfile.open(fileobj=stream, mode="r|") as archive:
            for member in archive:
                count += 1
                total += member.size if member.isreg() else 0
                if max_bytes is not None and (total > max_bytes or count > MAX_MEMBERS):
                    raise ValueError(
                        f"{total} bytes in {count} files; at most {max_bytes} bytes in "
                        f"{MAX_MEMBERS} files are allowed"
                    )
                path = _target_path(member.name, target)
                if member.isdir():
                    _make_folder(path)
                    folders.append((path, member.mode & 0o7777 if trusted else 0o755))
                elif member.issym() and trusted:
                    _make_room(path)
                    os.symlink(member.linkname, path)
                elif member.isreg():
                    _read_file(archive, member, path, trusted=trusted)
    except (tarfile.TarError, EOFError) as error:
        raise ValueError(f"the copy is not a valid archive: {error}") from None
    if not count:
        raise FileNotFoundError("nothing was copied")
    # Last, since a folder may be read-only.
    for path, mode in reversed(folders):
        os.chmod(path, mode)


def _target_path(name: str, target: str) -> str:
    parts = PurePosixPath(name).parts
    if not parts or parts[0] != ROOT or ".." in parts or "\0" in name:
        raise ValueError(f"the copy holds the name {name!r}, which does not stay below its target")
    return os.path.join(target, *parts[1:]) if parts[1:] else target


def _make_folder(path: str) -> None:
    if not _is_folder(path):
        _make_room(path)
        os.mkdir(path, 0o755)


def _make_room(path: str) -> None:
    os.makedirs(os.path.dirname(path) or "/", exist_ok=True)
    try:
        if _is_folder(path):
            os.rmdir(path)
        else:
            os.unlink(path)
    except FileNotFoundError:
        pass


def _read_file(
    archive: tarfile.TarFile, member: tarfile.TarInfo, path: str, *, trusted: bool
) -> None:
    _make_room(path)
    mode = member.mode & 0o7777 if trusted else (member.mode & 0o111) | 0o644
    content = archive.extractfile(member)
    assert content is not None
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(path, flags, 0o600), "wb") as file:
        while piece := content.read(_CHUNK):
            file.write(piece)
        os.fchmod(file.fileno(), mode)
