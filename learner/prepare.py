"""The name, folder and first model of a run."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import yaml

from broker.contract.wire import PlainSettings
from broker.errors import ConfigError, UserError
from broker.settings.config import RunSection, UserSettings
from broker.settings.registry import resolve
from broker.settings.run_settings import RunSettings
from broker.system.entry import EXIT_STOPPED
from broker.system.private_files import private_folder, private_write
from learner.checkpoints import checkpoint
from rlearner_text.config import ModelSection

log = logging.getLogger(__name__)

# Only the package that reads the data knows which files they are.
DATA_DIGESTS: Final = "envhub.config:data_digests"
# Receives progress messages for people.
Say = Callable[[str], None]


def name_run(config: UserSettings, path: str) -> UserSettings:
    """Return the config with ``run.name`` set; the default is the file's name and the time."""
    run = config.get("run") or {}
    if not isinstance(run, dict):
        return config  # refused by validation
    return {**config, "run": {**run, "name": run.get("name") or generate_name(path)}}


def generate_name(path: str) -> str:
    """Return a run's name from its file's name and the time."""
    # Only these characters may be part of a subject.
    stem = re.sub(r"[^A-Za-z0-9_-]", "-", Path(path).stem)
    return f"{stem[:40]}-{time.strftime('%Y%m%d-%H%M%S')}"


def run_folder(run: RunSection) -> Path:
    """Return ``<run.dir>/<run.name>``, absolute because other processes receive paths below it.

    Raises:
        ConfigError: if a file is in the way.
    """
    folder = (Path(run.dir) / str(run.name)).absolute()
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    if not nearest.is_dir():
        raise ConfigError(
            "run.dir", run.dir, f"a folder, or the name of a new one; {nearest} is a file"
        )
    return folder


def make_folder(folder: Path) -> Path:
    """Create the folder if it is missing, keep it from other users, and return it.

    Raises:
        UserError: if it cannot be created, belongs to another user, or everyone could write to it.
    """
    try:
        private_folder(folder)
    except OSError as error:
        raise UserError(f"{folder}: {error.strerror}") from None
    return folder


def exit_code(settings: RunSettings) -> int:
    """Return 0 if the run is complete, else 130 (stopped)."""
    newest = checkpoint.newest_checkpoint(run_folder(settings.run) / "checkpoints")
    is_complete = newest is not None and newest.step >= settings.train.steps
    return 0 if is_complete else EXIT_STOPPED


def nothing_left(run: str, steps: int) -> str:
    """Return the message for starting a completed run again."""
    advice = "raise train.steps to continue, or choose another run.name"
    return f"run {run} has completed its {steps} steps: nothing is left to do; {advice}"


def refuse_fewer_steps(folder: Path, run: str, steps: int) -> None:
    """Refuse fewer steps than the run has already made, before anything is written.

    Raises:
        UserError: if the newest checkpoint is beyond ``steps``.
    """
    newest = checkpoint.newest_checkpoint(folder / "checkpoints")
    if newest is not None and newest.step > steps:
        advice = (
            f"give the settings of its start (see {folder / 'config.yaml'}), or choose another "
            "run.name"
        )
        raise UserError(
            f"train.steps: {steps} is not allowed; run {run} has made {newest.step} steps already: "
            f"{advice}"
        )


def write_config(folder: Path, config: PlainSettings) -> Path:
    """Write the resolved configuration into the run's folder.

    Raises:
        UserError: if the folder cannot be written.
    """
    make_folder(folder)
    try:
        target = folder / "config.yaml"
        private_write(target, to_yaml(config).encode())
    except OSError as error:
        raise UserError(f"{folder}: {error.strerror}") from None
    return target


def to_yaml(config: PlainSettings) -> str:
    """Return a configuration as a user would write it."""
    return str(
        yaml.safe_dump(
            config, sort_keys=False, default_flow_style=None, width=110, allow_unicode=True
        )
    )


def data_digests(settings: RunSettings) -> dict[str, str]:
    """Return the content digest of every data file that the run's hubs read.

    Raises:
        UserError: if a file cannot be read.
    """
    digests: dict[str, str] = resolve("digests", DATA_DIGESTS, {})(settings)
    return digests


def base_model(model: ModelSection, folder: Path, say: Say) -> str:
    """Return the folder or hub name of ``model.path``; without one, build ``model.tiny``.

    Raises:
        UserError: if ``model.path`` is neither a model folder nor a hub name, or cannot be trained.
    """
    if model.path is not None:
        from rlearner_text.model_checks import check_trained_model

        check_trained_model(model, from_hub=True)
        local = Path(model.path).expanduser()
        return str(local.absolute()) if local.is_dir() else model.path
    out = folder / "model"
    if not (out / "config.json").exists():
        say("building the model")
        from rlearner_text.tiny import build_tiny

        build_tiny(out, model.tiny, seed=model.seed, dtype=model.dtype)
    return str(out)
