"""Logs to MLflow; ``trackers.args.mlflow`` has ``tracking_uri``, ``experiment`` and ``tags``."""

from __future__ import annotations

import json
import os
import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from broker.contract.wire import PlainSettings
from broker.errors import ConfigError
from broker.system.private_files import private_folder
from learner.reporting.trackers import flatten_settings

# MLflow reads it when it is imported.
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")

from mlflow import MlflowClient
from mlflow.entities import Metric, Param
from mlflow.utils.mlflow_tags import MLFLOW_LOGGED_ARTIFACTS

ARGS: Final = ("tracking_uri", "experiment", "tags")
# Tag by which a run continues.
RUN: Final = "rlearner.run"
PARAMS_PER_CALL: Final = 100  # of MLflow
# The newest, in a tag of at most 8,000 characters; the others stay as files.
TABLES_LISTED: Final = 50
# Characters that names in MLflow cannot have.
_REFUSED: Final = re.compile(r"[^\w\-./ ]")


class MLflow:
    """A ``Tracker``. The newest run of the same name and experiment continues.

    Without MLFLOW_TRACKING_URI or ``tracking_uri``, the data is in ``runs/<name>/mlflow``; show it
    with ``mlflow server --backend-store-uri sqlite:///runs/<name>/mlflow/mlflow.db``.

    Args:
        args: ``tracking_uri``; ``experiment``, the project by default; ``tags``, a mapping.

    Raises:
        ConfigError: if there is another argument.
    """

    def __init__(
        self,
        folder: Path,
        run: str,
        project: str,
        config: PlainSettings,
        args: Mapping[str, Any],
    ) -> None:
        for name, value in args.items():
            if name not in ARGS:
                raise ConfigError(
                    f"trackers.args.mlflow.{name}", value, f"known: {', '.join(ARGS)}"
                )
        own_folder = folder.absolute() / "mlflow"
        uri = args.get("tracking_uri") or os.environ.get("MLFLOW_TRACKING_URI")
        if uri is None:
            private_folder(own_folder)
        self._client = MlflowClient(uri or f"sqlite:///{own_folder / 'mlflow.db'}")
        experiment = self._experiment(
            str(args.get("experiment") or project), None if uri else own_folder / "artifacts"
        )
        self._run_id = self._find_run(experiment, run)
        if not self._run_id:
            tags = {
                RUN: run,
                **{str(name): str(value) for name, value in (args.get("tags") or {}).items()},
            }
            self._run_id = self._client.create_run(experiment, tags=tags, run_name=run).info.run_id
        self._client.update_run(self._run_id, status="RUNNING")
        self._log_settings(config)

    def _experiment(self, name: str, artifacts: Path | None) -> str:
        experiment = self._client.get_experiment_by_name(name)
        if experiment is not None:
            return str(experiment.experiment_id)
        location = artifacts.as_uri() if artifacts else None
        return str(self._client.create_experiment(name, artifact_location=location))

    def _find_run(self, experiment: str, run: str) -> str:
        """Return the id of the newest run of that name, empty if there is none."""
        condition = f"tags.`{RUN}` = '{run}'"
        runs = self._client.search_runs(
            [experiment], condition, max_results=1, order_by=["start_time DESC"]
        )
        return str(runs[0].info.run_id) if runs else ""

    def _log_settings(self, config: PlainSettings) -> None:
        """Log every setting as a parameter, which is final, and the current ones as a file."""
        self._client.log_dict(self._run_id, dict(config), "config.json")
        logged = self._client.get_run(self._run_id).data.params
        settings = {_valid_name(key): str(value) for key, value in flatten_settings(config).items()}
        new = [Param(key, value) for key, value in settings.items() if key not in logged]
        for start in range(0, len(new), PARAMS_PER_CALL):
            self._client.log_batch(self._run_id, params=new[start : start + PARAMS_PER_CALL])

    def log(self, step: int, values: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        metrics = [
            Metric(_valid_name(name), float(value), now, step) for name, value in values.items()
        ]
        self._client.log_batch(self._run_id, metrics=metrics)

    def texts(self, step: int, texts: Mapping[str, str]) -> None:
        for name, text in texts.items():
            self._client.log_text(self._run_id, text, f"{_valid_name(name)}/step-{step:06d}.md")

    def picture(self, step: int, name: str, gif: bytes) -> None:
        with tempfile.TemporaryDirectory() as place:
            path = Path(place, f"step-{step:06d}.gif")
            path.write_bytes(gif)
            self._client.log_artifact(self._run_id, str(path), _valid_name(name))

    def table(
        self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]
    ) -> None:
        """Write the file that ``log_table`` writes, without the pandas that it needs."""
        path = f"{_valid_name(name)}/step-{step:06d}.json"
        self._client.log_text(
            self._run_id, json.dumps({"columns": list(columns), "data": [*map(list, rows)]}), path
        )
        tags = self._client.get_run(self._run_id).data.tags
        try:
            listed = json.loads(tags.get(MLFLOW_LOGGED_ARTIFACTS, "[]"))
        # MLflow cuts a tag off at 8,000 characters.
        except ValueError:
            listed = []
        entry = {"path": path, "type": "table"}
        if entry not in listed:
            newest = [*listed, entry][-TABLES_LISTED:]
            self._client.set_tag(self._run_id, MLFLOW_LOGGED_ARTIFACTS, json.dumps(newest))

    def close(self) -> None:
        self._client.set_terminated(self._run_id)


def _valid_name(text: str) -> str:
    """Return a name with ``_`` for each character that MLflow refuses, as in ``avg@8``."""
    return _REFUSED.sub("_", text)
