"""Registry of trackers, which receive metrics; a new one is one file plus one line here.

A tracker is a class: ``Tracker(folder, run, project, config, args)`` with ``log(step, values)`` and
``close()``. If it also has ``texts(step, texts)``, ``picture(step, name, gif)`` or ``table(step,
name, columns, rows)``, it receives sample texts, pictures of episodes and tables of trajectories.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

from broker.contract.wire import PlainSettings
from broker.settings.registry import resolve
from learner.config import TrackersSection

log = logging.getLogger(__name__)

TRACKERS: Final[dict[str, str]] = {
    "tensorboard": "learner.reporting.trackers.tensorboard:TensorBoard",
    "wandb": "learner.reporting.trackers.wandb:WandB",
    "mlflow": "learner.reporting.trackers.mlflow:MLflow",
    "trackio": "learner.reporting.trackers.trackio:Trackio",
    "swanlab": "learner.reporting.trackers.swanlab:SwanLab",
}
ALWAYS: Final = "tensorboard"
FULL: Final = (errno.ENOSPC, errno.EDQUOT)


class Tracker(Protocol):
    """Destination of metrics.

    Args:
        folder: of the run; a tracker writes below it.
        run: the run's name.
        project: groups runs.
        config: the whole resolved configuration.
        args: ``trackers.args.<name>``.
    """

    def __init__(
        self,
        folder: Path,
        run: str,
        project: str,
        config: PlainSettings,
        args: Mapping[str, Any],
    ) -> None: ...
    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record the metrics of one step."""

    # Optional methods, of which the group takes those that a tracker has:
    # def texts(self, step: int, texts: Mapping[str, str]) -> None: Markdown by name
    # def picture(self, step: int, name: str, gif: bytes) -> None: an animated GIF
    # def table(self, step: int, name: str, columns: Sequence[str],
    #           rows: Sequence[Sequence[Any]]) -> None

    def close(self) -> None:
        """Write pending data and close."""


class TrackerGroup:
    """All trackers of a run; one that fails is disabled, and never fails the run."""

    def __init__(
        self, section: TrackersSection, folder: Path, run: str, config: PlainSettings
    ) -> None:
        names = list(dict.fromkeys([ALWAYS, *section.use]))
        classes = {name: resolve("trackers", name, TRACKERS) for name in names}
        self._lock = threading.Lock()  # steps and evaluations come from different threads
        self._open: dict[str, Tracker] = {
            name: build(folder, run, section.project, config, section.args.get(name, {}))
            for name, build in classes.items()
        }

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Send the metrics of a step to every tracker."""
        self._send(step, "log", values)

    def texts(self, step: int, texts: Mapping[str, str]) -> None:
        """Send sample texts, Markdown by name, to the trackers that take texts."""
        if texts:
            self._send(step, "texts", texts)

    def picture(self, step: int, name: str, gif: bytes) -> None:
        """Send an animated GIF to the trackers that take pictures."""
        self._send(step, "picture", name, gif)

    def table(
        self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]
    ) -> None:
        """Send a table to the trackers that take tables."""
        if rows:
            self._send(step, "table", name, columns, rows)

    def take(self, method: str) -> bool:
        """Return whether any tracker takes ``texts``, ``picture`` or ``table``."""
        return any(hasattr(tracker, method) for tracker in list(self._open.values()))

    def _send(self, step: int, method: str, *arguments: Any) -> None:
        with self._lock:
            for name, tracker in list(self._open.items()):
                try:
                    if (take := getattr(tracker, method, None)) is not None:
                        take(step, *arguments)
                # Libraries of trackers may raise anything, and none of it may fail the run.
                except Exception as error:
                    # A full disk is temporary.
                    if isinstance(error, OSError) and error.errno in FULL:
                        log.warning("tracker %s: step %d: %s", name, step, error.strerror)
                        continue
                    log.exception("tracker %s failed at step %d and is disabled", name, step)
                    del self._open[name]

    def close(self) -> None:
        """Close every tracker; later calls from other threads are dropped."""
        with self._lock:
            for name, tracker in self._open.items():
                try:
                    tracker.close()
                except Exception:
                    log.exception("tracker %s did not close", name)
            self._open.clear()


def flatten_settings(config: PlainSettings, prefix: str = "") -> dict[str, Any]:
    """Return settings by dotted name; a list is one setting."""
    values: dict[str, Any] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        values |= flatten_settings(value, f"{name}.") if isinstance(value, dict) else {name: value}
    return values
