"""TensorBoard event files in ``runs/<name>/tensorboard``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.utils.tensorboard.writer import SummaryWriter


class TensorBoard:
    """A ``Tracker``; ``args`` go to SummaryWriter."""

    def __init__(self, folder: Path, run: str, project: str, config: Mapping[str, Any], args: Mapping[str, Any]) -> None:
        self._writer = SummaryWriter(str(folder / "tensorboard"), **args)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
