"""Space of the file system under a folder, as metrics."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def disk_figures(folder: Path) -> dict[str, float]:
    """Return ``disk/free_bytes``, for this user, and ``disk/size_bytes``; empty if unknown."""
    with suppress(OSError):
        space = os.statvfs(folder)
        return {
            "disk/free_bytes": float(space.f_bavail * space.f_frsize),
            "disk/size_bytes": float(space.f_blocks * space.f_frsize),
        }
    return {}
