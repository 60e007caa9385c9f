"""Logs to SwanLab; ``trackers.args.swanlab`` goes to ``swanlab.init``: ``{mode: local}``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import swanlab

from broker.contract.wire import PlainSettings


class SwanLab:
    """A ``Tracker``. A run of the same name and project continues, also without the cloud."""

    def __init__(
        self,
        folder: Path,
        run: str,
        project: str,
        config: PlainSettings,
        args: Mapping[str, Any],
    ) -> None:
        arguments: dict[str, Any] = {
            "log_dir": str(folder / "swanlab"),
            "id": run,
            "resume": "allow",
        } | dict(args)
        self._run = swanlab.init(project=project, name=run, config=dict(config), **arguments)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def texts(self, step: int, texts: Mapping[str, str]) -> None:
        self._run.log({name: swanlab.Text(text) for name, text in texts.items()}, step=step)

    def picture(self, step: int, name: str, gif: bytes) -> None:
        self._run.log({name: swanlab.Video(gif)}, step=step)

    def table(
        self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]
    ) -> None:
        table = swanlab.echarts.Table()
        table.add(list(columns), [list(row) for row in rows])
        self._run.log({name: table}, step=step)

    def close(self) -> None:
        self._run.finish()
