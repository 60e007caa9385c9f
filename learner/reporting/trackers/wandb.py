"""Logs to Weights & Biases; ``trackers.args.wandb`` goes to ``wandb.init``: ``{mode: offline}``."""

from __future__ import annotations

import html
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import wandb

from broker.contract.wire import PlainSettings


class WandB:
    """A ``Tracker``. A run of the same name and project continues."""

    def __init__(
        self,
        folder: Path,
        run: str,
        project: str,
        config: PlainSettings,
        args: Mapping[str, Any],
    ) -> None:
        arguments: dict[str, Any] = {"id": run, "resume": "allow"} | dict(args)
        self._run = wandb.init(
            project=project, name=run, dir=str(folder), config=dict(config), **arguments
        )

        # An evaluation stands in the row of a later step.
        self._run.define_metric("eval/*", step_metric="eval/step")
        self._newest_step = 0

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if step < self._newest_step:
            self._add(values)
        else:
            self._newest_step = step
            self._run.log(dict(values), step=step)

    def texts(self, step: int, texts: Mapping[str, str]) -> None:
        pages = {
            name: wandb.Html(f"<p>step {step}</p><pre>{html.escape(text)}</pre>")
            for name, text in texts.items()
        }
        self._add(pages)

    def picture(self, step: int, name: str, gif: bytes) -> None:
        self._add({name: wandb.Video(io.BytesIO(gif), caption=f"step {step}", format="gif")})

    def table(
        self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]
    ) -> None:
        self._add({name: wandb.Table(columns=list(columns), data=[list(row) for row in rows])})

    def _add(self, values: Mapping[str, Any]) -> None:
        """Add values to the newest step's row: those of evaluated steps are closed already."""
        self._run.log(dict(values), commit=False)

    def close(self) -> None:
        self._run.finish()
