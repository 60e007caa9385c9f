"""Runs a pipeline: its folder, steps, evaluations, checkpoints.

A restarted run ends with the same bits. A step depends only on the seed, its number and the newest
checkpoint, so a run resumes from there exactly; lines of ``metrics.jsonl`` beyond it are cut off
and written again.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Final

import yaml

from broker.errors import UserError
from broker.settings.registry import resolve
from broker.system.locks import lock
from broker.system.private_files import private_folder
from learner.checkpoints import checkpoint
from learner.credit.dataset_record import check_sources, describe_sources, note_datasets
from learner.offline import PIPELINES
from learner.offline.base import (
    CLASSIFIER_FOLDER,
    REFERENCE,
    OfflineJob,
    OfflinePipeline,
    check_finite,
)
from learner.offline.config import OfflineSettings, first_changed_key
from learner.offline.data import shuffled_batches
from learner.offline.progress import Show, show_progress
from learner.prepare import base_model, make_folder, run_folder, write_config
from learner.reporting.metrics import MetricsFile, finite_values
from learner.reporting.starts import note_start
from learner.reporting.trackers import TrackerGroup
from learner.run_folder import OFFLINE_LOCK
from rlearner_text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

# Offline runs have no incarnations that could compete.
EPOCH: Final = 1


@dataclass(frozen=True)
class OfflineResult:
    """Result of a run: the checkpoint of its last step, and the metrics of that step."""

    path: Path
    steps: int
    values: Mapping[str, float]
    seconds: float


def run_pipeline(name: str, settings: OfflineSettings, url: str = "") -> OfflineResult:
    """Train to the last step, from the newest checkpoint in the run's folder if there is one.

    Args:
        name: of the pipeline.
        settings: validated, with ``run.name`` set.
        url: of the broker, for a served teacher.

    Raises:
        UserError: if the settings or the data differ from those of the run's start, there is no
            such model, a row is malformed, the loss is not finite, or another process trains the
            run.
    """
    folder = run_folder(settings.run)
    with _lock_folder(folder, str(settings.run.name)):
        return _train_run(name, settings, folder, url)


def _lock_folder(folder: Path, run: str) -> IO[bytes]:
    """Lock the run's folder for this process; a learner with a broker is fenced instead."""
    make_folder(folder)
    try:
        problem = (
            f"another process trains run {run} in {folder}; wait for its end, or choose another "
            "run.name"
        )
        # A list of runs holds it for a moment.
        return lock(folder / OFFLINE_LOCK, f"run.name: {problem}", wait_s=0.5)
    except OSError as error:
        raise UserError(f"{folder}: {error.strerror}") from None


def _train_run(name: str, settings: OfflineSettings, folder: Path, url: str) -> OfflineResult:
    _refuse_other_settings(folder, settings)
    newest = checkpoint.newest_checkpoint(folder / "checkpoints")
    steps = settings.train.steps
    if newest is not None and newest.step > steps:
        raise UserError(
            f"train.steps: {steps} is not allowed; the run has made {newest.step} steps already"
        )
    _remove_unstarted_files(folder)
    checkpoint.remove_partial(folder / "checkpoints")
    datasets = describe_sources(settings.data.sources())
    check_sources(folder, str(settings.run.name), datasets)
    first_path = base_model(settings.model, folder, log.info)
    model_path = first_path if newest is None else str(newest.path)
    tokenizer = Tokenizer.of_run(first_path, settings.model)
    job = OfflineJob(
        settings, folder, first_path, model_path=model_path, tokenizer=tokenizer, url=url
    )
    pipeline: OfflinePipeline = resolve("pipelines", name, PIPELINES)(job)
    # Only now that the input is valid: from here on the settings must not change.
    config = settings.to_plain()
    write_config(folder, config)
    note_datasets(folder, datasets)
    note_start(folder, config, EPOCH, settings.data.digests(), first_path)
    try:
        if newest is not None:
            checkpoint.load_state(newest, pipeline.backend)
        return _Loop(
            name,
            job,
            pipeline,
            first=0 if newest is None else newest.step,
            is_resumed=newest is not None,
        ).run()
    finally:
        pipeline.close()


def _refuse_other_settings(folder: Path, settings: OfflineSettings) -> None:
    file = folder / "config.yaml"
    if not file.exists():
        return
    try:
        old_config = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise UserError(f"{file}: cannot be read: {' '.join(str(error).split())}") from None
    key = first_changed_key(old_config if isinstance(old_config, dict) else {}, settings.to_plain())
    if key is not None:
        raise UserError(
            f"{key}: differs from what run {settings.run.name} was started with (see {file}); "
            "choose another run.name"
        )


def _remove_unstarted_files(folder: Path) -> None:
    """Remove files of a start that refused its input: the next one may have other settings."""
    if not (folder / "config.yaml").exists():
        for name in ("model", CLASSIFIER_FOLDER):
            shutil.rmtree(folder / name, ignore_errors=True)
        (folder / REFERENCE).unlink(missing_ok=True)


class _Loop:
    """Loop over the steps."""

    def __init__(
        self,
        name: str,
        job: OfflineJob[OfflineSettings],
        pipeline: OfflinePipeline,
        *,
        first: int,
        is_resumed: bool,
    ) -> None:
        self._name = name
        self._job = job
        self._pipeline = pipeline
        self._first = first
        self._is_resumed = is_resumed
        self._checkpoints = job.folder / "checkpoints"
        private_folder(self._checkpoints)
        self._file = MetricsFile(job.folder / "metrics.jsonl", first if is_resumed else -1)
        settings = job.settings
        self._trackers = TrackerGroup(
            settings.trackers, job.folder, str(settings.run.name), settings.to_plain()
        )
        self._newest: dict[str, float] = {}

    def run(self) -> OfflineResult:
        train = self._job.settings.train
        began_at = time.monotonic()
        try:
            with show_progress(self._name, self._first, train.steps) as show:
                if not self._is_resumed and self._job.settings.eval.at_start:
                    self._write(0, self._pipeline.evaluate())
                batches = shuffled_batches(
                    self._pipeline.num_rows, train.batch_size, self._job.settings.run.seed
                )
                remaining = islice(batches, self._first, None)
                for step, rows in zip(
                    range(self._first + 1, train.steps + 1), remaining, strict=False
                ):
                    self._step(step, rows, show)
        finally:
            self._file.close()
            self._trackers.close()
        path = self._checkpoints / f"step-{train.steps:06d}"
        return OfflineResult(path, train.steps, self._newest, time.monotonic() - began_at)

    def _step(self, step: int, rows: list[int], show: Show) -> None:
        began_at = time.monotonic()
        values = self._pipeline.step(rows)
        check_finite(
            values,
            step,
            "train.lr",
            self._job.settings.train.lr,
            self._pipeline.backend.take_problem(),
        )
        seconds = time.monotonic() - began_at
        values |= {
            "time/step": seconds,
            "perf/tokens_per_s": values["train/tokens"] / max(seconds, 1e-9),
        }
        every = self._job.settings.eval.every_steps
        is_last = step == self._job.settings.train.steps
        if is_last or (every and step % every == 0):
            values |= self._pipeline.evaluate()
        self._write(step, values)
        show(step, _summarize_metrics(values))
        settings = self._job.settings.checkpoint
        if is_last or (settings.every_steps and step % settings.every_steps == 0):
            self._save(step, settings.keep)

    def _save(self, step: int, keep: int) -> None:
        try:
            summary = {"version": step, "pipeline": self._name}
            backend = self._pipeline.backend
            hf_max_gib = self._job.settings.checkpoint.hf_max_gib
            checkpoint.write_checkpoint(
                self._checkpoints, backend, summary, EPOCH, hf_max_gib=hf_max_gib
            )
            checkpoint.prune_checkpoints(self._checkpoints, keep)
        except OSError as error:
            raise UserError(
                f"{self._checkpoints}: step {step} cannot be written: {error.strerror or error}"
            ) from None

    def _write(self, step: int, values: Mapping[str, float]) -> None:
        if not values:
            return
        numbers = finite_values(values)
        try:
            self._file.write({"step": step, "time": time.time()} | numbers)
        except OSError as error:
            file = self._job.folder / "metrics.jsonl"
            raise UserError(
                f"{file}: step {step} cannot be written: {error.strerror or error}"
            ) from None
        self._trackers.log(step, numbers)
        self._newest = numbers


def _summarize_metrics(values: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics that fit on a line."""
    labels = {
        "loss": "train/loss",
        "accuracy": "train/accuracy",
        "held-out": "eval/loss",
        "lr": "train/lr",
        "tok/s": "perf/tokens_per_s",
    }
    return {label: values[name] for label, name in labels.items() if name in values}
