"""A run as an object: starts ``rlearner up``, follows it, and reads its results."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Final

from broker.errors import ConfigError, RlearnerError, UserError
from broker.settings.config import UserSettings
from broker.settings.run_settings import stored_value
from broker.settings.runspec import check_settings, load
from broker.system.private_files import private_write
from learner.checkpoints.checkpoint import newest_checkpoint
from learner.gpu_selection import with_weights_on_host
from learner.prepare import generate_name, name_run, to_yaml
from rlearner.api import run_records
from rlearner.api.followed_command import FollowedCommand
from rlearner.api.plain_values import format_overrides, plain_value, read_dataset
from rlearner.api.progress_line import ProgressLine
from rlearner.api.reward_functions import Reward, RewardFunctions
from rlearner.ops.folder_cleanup import removed_on_failure

START_FILE: Final = "start.yaml"
DATA_FILE: Final = "data.jsonl"


class Run:
    """A run on this machine, as ``rlearner up`` starts it.

    Args:
        config: a configuration's file, a run's folder, or a mapping of sections. A mapping may
            ``inherit`` an absolute file name or ``configs/NAME.yaml``.
        reward_funcs: functions of this program, added to the rewards of each domain. They run here,
            one call at a time, in a thread. Names and entries of rewards are allowed, too.
        dataset: rows for ``data.jsonl`` in the run's folder, which a mapping names as
            ``${here}/data.jsonl``.
        sections: settings that replace those of ``config``, nested: ``train={"steps": 3}``.

    Attributes:
        name: of the run, ``run.name``.
        folder: of the run.

    Raises:
        UserError: with the line that the command prints.
    """

    def __init__(
        self,
        config: UserSettings | str | os.PathLike[str],
        /,
        *,
        reward_funcs: Reward | Iterable[Reward] = (),
        dataset: Any = None,
        **sections: Any,
    ) -> None:
        self._rewards = RewardFunctions(reward_funcs)
        self._rows = None if dataset is None else read_dataset(dataset)
        self._overrides = format_overrides(sections)
        self._config = plain_value(config, "config") if isinstance(config, Mapping) else None
        self._path = "" if self._config is not None else os.fspath(config)  # type: ignore[arg-type]
        settings: UserSettings
        if self._config is not None:
            settings = name_run({"run": _run_section(self._config, sections)}, "python")
        else:
            settings = name_run(load(self._path, self._overrides), self._path)
        self.name = str(_run_section(settings)["name"])
        parent = Path(str(stored_value(settings, "run", "dir") or "runs"))
        self.folder = parent.absolute() / self.name
        self._command: FollowedCommand | None = None
        self._steps = 0
        self._cleanup = ExitStack()

    def __repr__(self) -> str:
        state = "running" if self.is_running else "not running"
        return f"<Run {self.name}: {state}, folder {self.folder}>"

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def is_running(self) -> bool:
        """Whether its processes have been started here and have not ended."""
        return self._command is not None and self._command.is_running

    def up(self, *options: str) -> Run:
        """Start all processes in the background, and return this run.

        They end when this process ends.

        Args:
            options: of ``rlearner up``, for example ``--share-gpus``.

        Raises:
            UserError: if it is running here, or its settings are not allowed.
        """
        if self.is_running:
            raise UserError(f"run {self.name} is running here already; wait for it, or stop it")
        with suppress(RlearnerError):
            self._finish()
        with ExitStack() as stack:
            stack.enter_context(removed_on_failure(self.folder))
            path = self._write_files()
            overrides = [*self._overrides, f"run.name={self.name}"]
            overrides += self._reward_overrides(load(path, overrides))
            config = load(path, overrides)
            shares_gpus = "--share-gpus" in options
            config = with_weights_on_host(config) if shares_gpus else config
            self._steps = check_settings(config).train.steps
            words = ["up", path, *overrides, *options, "--json"]
            self._command = FollowedCommand(words, self.folder, self._rewards.functions)
            self._cleanup = stack.pop_all()
        return self

    def wait(self, *, progress: bool = True) -> Run:
        """Wait until the run has completed its steps or was stopped; return it.

        An exception here, as of Ctrl-C, stops the run.

        Args:
            progress: show one line that changes, or a line for each step outside terminals and
                notebooks.

        Raises:
            UserError: if it was not started here, or with the line that ``rlearner up`` printed; if
                a reward function failed, from its error.
        """
        if self._command is None:
            raise UserError(f"run {self.name} was not started here; call up() first")
        line = ProgressLine(self.name, self._steps) if progress else None
        try:
            for event in self._command.events():
                if line is not None:
                    line.show(event)
        except BaseException:
            with suppress(RlearnerError):
                self.stop()
            raise
        finally:
            if line is not None:
                line.close()
        self._finish()
        return self

    def stop(self) -> None:
        """Stop the run with a last checkpoint, and wait for its processes.

        Raises:
            UserError: as in ``wait``.
        """
        if self._command is not None:
            self._command.stop()
            self._finish()

    def metrics(self) -> Any:
        """Return one row for each step so far: a DataFrame, or a list without pandas."""
        return run_records.read_metrics(self.folder)

    def samples(self) -> Any:
        """Return one row for each kept training sequence: a DataFrame, or a list without pandas.

        Raises:
            UserError: if the run keeps none (``samples.keep``).
        """
        return run_records.read_samples(self.folder)

    def evaluate(self, model: str | os.PathLike[str] | None = None, **sections: Any) -> Any:
        """Measure a model on the run's held-out tasks, as ``rlearner eval``; return the result.

        Args:
            model: a folder or hub name; None: the run's newest checkpoint.
            sections: settings, for example ``eval={"tasks": 100}``.

        Raises:
            UserError: with the line that the command prints; if there is no checkpoint.
        """
        if model is None:
            checkpoint = newest_checkpoint(self.folder / "checkpoints")
            if checkpoint is None:
                raise UserError(f"run {self.name} has no checkpoint yet; name a model")
            model = checkpoint.path
        name = generate_name(f"eval-{self.name}")
        overrides = [*format_overrides(sections), f"run.name={name}"]
        words = ["eval", os.fspath(model), str(self.folder), *overrides, "--json"]
        command = FollowedCommand(words, self.folder.parent / name, self._rewards.functions)
        try:
            rows = list(command.events())
        except BaseException:
            command.stop()
            raise
        command.finish()
        return rows[-1] if rows else {}

    def _finish(self) -> None:
        command = self._command
        self._command = None
        with self._cleanup:
            if command is not None:
                command.finish()

    def _write_files(self) -> str:
        """Write rows and sections to the run's folder; return the configuration's path."""
        if self._rows is not None:
            lines = (f"{json.dumps(row, ensure_ascii=False)}\n" for row in self._rows)
            private_write(self.folder / DATA_FILE, "".join(lines).encode())
        if self._config is None:
            return self._path
        private_write(self.folder / START_FILE, to_yaml(self._config).encode())
        return str(self.folder / START_FILE)

    def _reward_overrides(self, config: UserSettings) -> list[str]:
        """Return the overrides that add this program's rewards to each domain."""
        domains = config.get("domains")
        changed: dict[str, Any] = {}
        for name, domain in (domains if isinstance(domains, dict) else {}).items():
            if isinstance(domain, dict) and (missing := self._rewards.missing_in(domain)):
                changed[name] = {"rewards": [*(domain.get("rewards") or []), *missing]}
        return format_overrides({"domains": changed}) if changed else []


def _run_section(*configs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the section ``run``, of which later configurations replace values.

    Raises:
        ConfigError: if it is not a mapping.
    """
    merged: dict[str, Any] = {}
    for config in configs:
        section = config.get("run") or {}
        if not isinstance(section, Mapping):
            raise ConfigError("run", section, "expected a mapping")
        merged |= plain_value(section, "run")
    return merged
