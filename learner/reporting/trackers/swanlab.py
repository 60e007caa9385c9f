"""Logs to SwanLab; ``trackers.args.swanlab`` goes to ``swanlab.init``, for example ``{mode: local}``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import swanlab


class SwanLab:
    """A ``Tracker``."""

    def __init__(
        self, folder: Path, run: str, project: str, config: Mapping[str, Any], args: Mapping[str, Any]
    ) -> None:
        settings: dict[str, Any] = {"logdir": str(folder / "swanlab")} | dict(args)
        swanlab.init(project=project, experiment_name=run, config=dict(config), **settings)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        swanlab.log(dict(values), step=step)

    def texts(self, step: int, texts: Mapping[str, str]) -> None:
        swanlab.log({name: swanlab.Text(text) for name, text in texts.items()}, step=step)

    def picture(self, step: int, name: str, gif: bytes) -> None:
        swanlab.log({name: swanlab.Video(gif)}, step=step)

    def close(self) -> None:
        swanlab.finish()
