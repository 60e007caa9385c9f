"""A start that fails before it holds the run leaves nothing behind."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from broker.errors import UserError
from learner.run_folder import noted_epoch


@contextmanager
def removed_on_failure(folder: Path) -> Iterator[None]:
    """Make a run's folder, and remove it when the block ends with a UserError, or leaves it empty.

    Not a folder that was there, nor one whose run a learner has held, nor where the message points at a file in it, such as a log.

    Raises:
        UserError: it cannot be made.
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
    """The folders that this made, the innermost first; none where the run's own was there: of two processes one has made it."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        return []
    except OSError as error:
        raise UserError(f"{folder}: {error.strerror}") from None
    return missing
