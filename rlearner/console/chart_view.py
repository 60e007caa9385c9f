"""How the charts were shown last, in a file of the user's cache.

A browser keeps it by the console's address, which changes with each start on loopback. A browser
that has nothing of this address begins with the file.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from pathlib import Path
from typing import Any, Final

import msgspec

from broker.errors import UserError
from broker.system.private_files import private_folder, private_write

log = logging.getLogger(__name__)

FILE: Final = "charts.json"
MAX_BYTES: Final = 64 * 1024


class ChartViewData(msgspec.Struct, forbid_unknown_fields=True):
    """What a browser keeps.

    Attributes:
        smoothing: share of a curve over which it is averaged.
        axis: step or time.
        order, hidden, wide: titles of charts.
        lines: whether a metric's line is shown, where that was chosen.
    """

    smoothing: float = 0.1
    axis: str = "step"
    order: list[str] = []
    hidden: list[str] = []
    wide: list[str] = []
    lines: dict[str, bool] = {}


class ChartView:
    """The file of one user."""

    def __init__(self, path: Path | None = None) -> None:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        self.path = path or base / "rlearner" / "console" / FILE

    def read(self) -> dict[str, Any] | None:
        """Return what was kept last, None if there is nothing that can be read."""
        try:
            with self.path.open("rb") as file:
                data = file.read(MAX_BYTES + 1)
            view = msgspec.json.decode(data, type=ChartViewData)
        except (OSError, msgspec.MsgspecError):
            return None
        return msgspec.to_builtins(view)  # type: ignore[no-any-return]

    def write(self, view: Any) -> None:
        """Keep what a browser sent; anything else, and a disk that is full, is ignored."""
        with contextlib.suppress(msgspec.MsgspecError, TypeError, ValueError):
            data = json.dumps(msgspec.to_builtins(msgspec.convert(view, ChartViewData))).encode()
            if len(data) > MAX_BYTES:
                return
            try:
                private_folder(self.path.parent)
                private_write(self.path, data)
            except (OSError, UserError) as error:
                log.info("%s: %s", self.path, error)
