"""Weights & Biases; ``trackers.args.wandb`` goes to ``wandb.init``, for example ``{mode: offline}``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import wandb


class WandB:
    """A ``Tracker``. A run of the same name and project goes on where it was."""

    def __init__(self, folder: Path, run: str, project: str, config: Mapping[str, Any], args: Mapping[str, Any]) -> None:
        settings: dict[str, Any] = {"id": run, "resume": "allow"} | dict(args)
        self._run = wandb.init(project=project, name=run, dir=str(folder), config=dict(config), **settings)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()
