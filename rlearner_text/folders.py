"""Writing a folder so that a reader, or a crash, sees either all of it or nothing."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic_folder(target: str | Path) -> Iterator[Path]:
    """A temporary folder beside ``target`` that takes its place when the block ends, and vanishes when it raises.

    A folder already at ``target`` is replaced; between the two renames nothing stands there.
    """
    work = begin_folder(target)
    try:
        yield work
        sync_tree(work)
        finish_folder(work, target)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def begin_folder(target: str | Path) -> Path:
    """An empty folder beside ``target``, to be filled, then synced, then finished."""
    final = Path(target).absolute()
    final.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{final.name}.", dir=final.parent))
    work.chmod(0o755)  # mkdtemp makes it private, and other processes of the run read it
    return work


def sync_tree(folder: Path) -> None:
    """Everything in a folder is on disk, names included, and readable by others."""
    for path in [*folder.rglob("*"), folder]:
        if path.is_file():
            path.chmod(0o644)  # safetensors writes private files
        sync(path)


def finish_folder(work: Path, target: str | Path) -> None:
    """Rename a folder that was synced to ``target``; when this returns, the name lasts too."""
    final = Path(target).absolute()
    if final.exists():
        _swap(work, final)
    else:
        os.rename(work, final)
    sync(final.parent)


def remove_folder(folder: Path) -> None:
    """Delete a folder; a crash on the way leaves it whole or under a hidden name, never half of it under its own."""
    doomed = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(doomed, ignore_errors=True)  # of an earlier crash
    os.rename(folder, doomed)
    shutil.rmtree(doomed)


def sync(path: Path) -> None:
    """A file's bytes, or a folder's names, are on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _swap(work: Path, final: Path) -> None:
    old = Path(tempfile.mkdtemp(prefix=f".{final.name}.old.", dir=final.parent))
    try:
        os.rename(final, old / "was")
        os.rename(work, final)
    finally:
        shutil.rmtree(old, ignore_errors=True)
