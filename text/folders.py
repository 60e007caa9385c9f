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
    final = Path(target).absolute()
    final.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{final.name}.", dir=final.parent))
    work.chmod(0o755)  # mkdtemp makes it private, and other processes of the run read it
    try:
        yield work
        _finish_files(work)
        _replace(work, final)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _finish_files(folder: Path) -> None:
    for file in folder.rglob("*"):
        if file.is_file():
            file.chmod(0o644)  # safetensors writes private files
            with file.open("rb") as handle:
                os.fsync(handle.fileno())


def _replace(work: Path, final: Path) -> None:
    if not final.exists():
        os.rename(work, final)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{final.name}.old.", dir=final.parent))
    try:
        os.rename(final, old / "was")
        os.rename(work, final)
    finally:
        shutil.rmtree(old, ignore_errors=True)
