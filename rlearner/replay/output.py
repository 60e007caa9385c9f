"""Writes the run folder of a replay: configuration, metrics, and the last checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from broker.contract.streams import check_token
from broker.errors import UserError
from broker.settings.run_settings import RunSettings
from learner.prepare import write_config
from learner.reporting.metrics import MetricsFile
from rlearner.replay.run import ReplayedStep

# Metrics about the recorded run, not the replay.
OF_THE_RUN: Final = ("ticket/", "off_policy/")


def free_folder(folder: Path) -> Path:
    """Return ``<run>-replay-1`` next to the run's folder, or the next free number."""
    number = 1
    while (candidate := folder.with_name(f"{folder.name}-replay-{number}")).exists():
        number += 1
    return candidate


class ReplayOutput:
    """Output folder of a replay.

    Raises:
        UserError: if the folder is not empty, or its name cannot be a run's.
    """

    def __init__(self, folder: Path, settings: RunSettings) -> None:
        # Another run's lines must not mix with these.
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UserError(f"--out {folder}: already exists; name an empty or a new folder")
        self.folder = folder.absolute()
        name = check_token(self.folder.name, "--out")
        settings = settings.with_values("run", name=name, dir=str(self.folder.parent))
        write_config(self.folder, settings.to_plain())
        self._metrics = MetricsFile(self.folder / "metrics.jsonl")

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    def write(self, replayed: ReplayedStep) -> None:
        """Write a step's line."""
        values = {
            name: value
            for name, value in replayed.values.items()
            if not name.startswith(OF_THE_RUN)
        }
        self._metrics.write({"step": replayed.step, "policy_version": replayed.step, **values})

    def close(self) -> None:
        self._metrics.close()
