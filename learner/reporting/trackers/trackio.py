"""Logs to Trackio; ``trackers.args.trackio`` goes to ``trackio.init``: ``{space_id: me/run}``."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from broker.contract.wire import PlainSettings

# Environment variable that trackio reads when it is imported.
FOLDER: Final = "TRACKIO_DIR"

if find_spec("trackio") is None:
    raise ModuleNotFoundError("No module named 'trackio'", name="trackio")


class Trackio:
    """A ``Tracker``. A run of the same name and project continues.

    Without TRACKIO_DIR, a Space or a server, the data is in ``runs/<name>/trackio``; show it with
    ``TRACKIO_DIR=runs/<name>/trackio trackio show``.
    """

    def __init__(
        self,
        folder: Path,
        run: str,
        project: str,
        config: PlainSettings,
        args: Mapping[str, Any],
    ) -> None:
        os.environ.setdefault(FOLDER, str(folder / "trackio"))
        # Imported only now: it reads the variable once.
        import trackio

        self._trackio = trackio
        arguments: dict[str, Any] = {
            "resume": "allow",
            "embed": False,
            "auto_log_cpu": False,
        } | dict(args)
        self._run = trackio.init(project=project, name=run, config=dict(config), **arguments)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def texts(self, step: int, texts: Mapping[str, str]) -> None:
        self._run.log(
            {name: self._trackio.Markdown(text) for name, text in texts.items()}, step=step
        )

    def picture(self, step: int, name: str, gif: bytes) -> None:
        # Trackio copies the file at once.
        with tempfile.NamedTemporaryFile(suffix=".gif") as file:
            file.write(gif)
            file.flush()
            self._run.log({name: self._trackio.Video(file.name, caption=f"step {step}")}, step=step)

    def table(
        self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]
    ) -> None:
        table = self._trackio.Table(columns=list(columns), data=[list(row) for row in rows])
        self._run.log({name: table}, step=step)

    def close(self) -> None:
        self._run.finish()
