"""Removes the folder of a run whose start failed before a learner held it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from broker.errors import UserError
from broker.system.private_files import private_folder
from learner.run_folder import noted_epoch


@contextmanager
def removed_on_failure(folder: Path) -> Iterator[None]:
    """Create a run's folder, and remove it if the block raises a UserError or leaves it empty.

    Keep a folder that existed before, whose run a learner has held, or that the error message
    points into.

    Raises:
        UserError: if the folder cannot be created, belongs to another user, or everyone could write
            to it.
    """
    new_folders = _make_folder(folder)
    try:
        yield
    except UserError as error:
        # A message that points into the folder is about a log or file that the user needs.
        if new_folders and not noted_epoch(folder) and f"{folder}/" not in str(error):
            shutil.rmtree(folder, ignore_errors=True)
        raise
    finally:
        for path in new_folders:
            if path.exists() and any(path.iterdir()):
                break
            if path.exists():
                path.rmdir()


def _make_folder(folder: Path) -> list[Path]:
    """Create the folder and its parents; return the new ones, innermost first.

    A folder that exists is only closed to other users.
    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700, parents=True)
            return missing
        private_folder(folder)
        return []
    except OSError as error:
        raise UserError(f"{folder}: {error.strerror}") from None
