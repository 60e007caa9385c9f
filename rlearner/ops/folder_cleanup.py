"""Removes the folder of a run whose start failed before a learner held it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from broker.errors import UserError
from learner.run_folder import noted_epoch


@contextmanager
def removed_on_failure(folder: Path) -> Iterator[None]:
    """Create a run's folder, and remove it if the block raises a UserError or leaves it empty.

    Keep a folder that existed before, whose run a learner has held, or that the error message points into.

    Raises:
        UserError: if the folder cannot be created.
    """
    made = _make(folder)
    try:
        yield
    except UserError as error:
        if made and not noted_epoch(folder) and f"{folder}/" not in str(error):
            shutil.rmtree(folder, ignore_errors=True)
        raise
    finally:
        for path in made:
            if path.exists() and any(path.iterdir()):
                break
            if path.exists():
                path.rmdir()


def _make(folder: Path) -> list[Path]:
    """Create the folder and return what was created, innermost first; nothing if it exists."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        return []
    except OSError as error:
        raise UserError(f"{folder}: {error.strerror}") from None
    return missing
