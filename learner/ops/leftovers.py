"""A start that fails before it holds the run leaves nothing behind."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from broker.errors import UserError
from learner.ops.place import noted_epoch


@contextmanager
def removed_on_failure(folder: Path) -> Iterator[None]:
    """Remove a run's folder, and folders above it, that were made in the block, when it ends with a UserError.

    Not once a learner has held the run, and not where the message points at a file in the folder, such as a log.
    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        yield
    except UserError as error:
        if missing and not noted_epoch(folder) and f"{folder}/" not in str(error):
            shutil.rmtree(folder, ignore_errors=True)
            for parent in missing[1:]:
                if not parent.is_dir() or any(parent.iterdir()):
                    break
                parent.rmdir()
        raise
