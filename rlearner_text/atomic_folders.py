"""Writes folders atomically: a reader, or a crash, sees either all of a folder or none of it."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from broker.system.private_files import exchange, replace, sync


@contextmanager
def atomic_folder(target: str | Path) -> Iterator[Path]:
    """Yield a temporary folder that becomes ``target`` at the end; an error removes it.

    An existing ``target`` is replaced at once on Linux; on file systems that cannot, it is missing
    for a moment.
    """
    work = begin_folder(target)
    try:
        yield work
        sync_tree(work)
        finish_folder(work, target)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def begin_folder(target: str | Path) -> Path:
    """Create an empty folder next to ``target``, to fill, sync and then finish."""
    final = Path(target).absolute()
    final.parent.mkdir(parents=True, exist_ok=True)
    # only this user can enter it
    return Path(tempfile.mkdtemp(prefix=f".{final.name}.", dir=final.parent))


def sync_tree(folder: Path) -> None:
    """Flush everything in a folder to disk, including names, and keep it from other users."""
    for path in [*folder.rglob("*"), folder]:
        path.chmod(0o700 if path.is_dir() else 0o600)
        sync(path)


def finish_folder(work: Path, target: str | Path) -> None:
    """Rename a synced folder to ``target``, durably."""
    final = Path(target).absolute()
    if final.exists():
        _swap_folders(work, final)
    else:
        replace(work, final)


def remove_folder(folder: Path) -> None:
    """Delete a folder; a crash leaves it whole or under a hidden name, never half of it under its
    own name.
    """
    doomed = folder.with_name(f".{folder.name}.old")
    # Left by an earlier crash.
    shutil.rmtree(doomed, ignore_errors=True)
    replace(folder, doomed)
    shutil.rmtree(doomed)


def _swap_folders(work: Path, final: Path) -> None:
    try:
        exchange(work, final)
    except OSError:
        # The file system cannot.
        _rename_twice(work, final)
    else:
        shutil.rmtree(work, ignore_errors=True)  # the old one


def _rename_twice(work: Path, final: Path) -> None:
    old = Path(tempfile.mkdtemp(prefix=f".{final.name}.old.", dir=final.parent))
    try:
        os.rename(final, old / "was")
        os.rename(work, final)
        sync(final.parent)
    finally:
        shutil.rmtree(old, ignore_errors=True)
