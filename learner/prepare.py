"""Prepares the first version of a run: its name and folder, the model, the warm start."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import IO, Any, Final

import yaml

from broker.errors import ConfigError, UserError
from broker.runtime.children import spawn
from broker.runtime.entry import EXIT_STOPPED
from broker.settings.config import RunSection
from broker.settings.registry import resolve
from broker.settings.runspec import section
from learner.checkpoints import checkpoint
from learner.config import TrainSection, WarmStartSection
from text.config import ModelSection

log = logging.getLogger(__name__)

DATA_DIGESTS: Final = "envhub.config:data_digests"  # the hubs know which data files they read
Say = Callable[[str], None]


class Interrupted(Exception):
    """A stop was requested before the model was ready."""


def name_run(config: dict[str, Any], path: str) -> dict[str, Any]:
    """Return the config with ``run.name`` set; the default is the file's name and the time."""
    run = config.get("run") or {}
    if not isinstance(run, dict):
        return config  # refused by validation
    run = dict(run)
    if not run.get("name"):
        stem = "".join(char if char.isalnum() or char in "_-" else "-" for char in Path(path).stem)
        run["name"] = f"{stem[:40]}-{time.strftime('%Y%m%d-%H%M%S')}"
    return {**config, "run": run}


def run_folder(config: dict[str, Any]) -> Path:
    """Return ``<run.dir>/<run.name>``, absolute because other processes receive paths below it.

    Raises:
        ConfigError: if a file is in the way.
    """
    run = section(config, "run", RunSection)
    folder = (Path(run.dir) / str(run.name)).absolute()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not there.is_dir():
        raise ConfigError("run.dir", run.dir, f"a folder, or the name of a new one; {there} is a file")
    return folder


def make_folder(folder: Path) -> Path:
    """Create the folder if it is missing, and return it.

    Raises:
        UserError: if it cannot be created.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder}: {error.strerror}") from None
    return folder


def exit_code(config: dict[str, Any]) -> int:
    """Return 0 if the run of a validated configuration has completed all its steps, else 130 (stopped)."""
    made = checkpoint.newest(run_folder(config) / "checkpoints")
    return 0 if made is not None and made.step >= section(config, "train", TrainSection).steps else EXIT_STOPPED


def nothing_left(run: str, steps: int) -> str:
    """Return the message for starting a completed run again."""
    return f"run {run} has completed its {steps} steps: nothing is left to do; raise train.steps to continue, or choose another run.name"


def refuse_fewer_steps(folder: Path, run: str, steps: int) -> None:
    """Refuse fewer steps than the run has already made, before anything is written.

    Raises:
        UserError: if the newest checkpoint is beyond ``steps``.
    """
    made = checkpoint.newest(folder / "checkpoints")
    if made is not None and made.step > steps:
        raise UserError(
            f"train.steps: {steps} is not allowed; run {run} has made {made.step} steps already: "
            f"give the settings of its start (see {folder / 'config.yaml'}), or choose another run.name"
        )


def write_config(folder: Path, config: dict[str, Any]) -> Path:
    """Write the resolved configuration into the run's folder.

    Raises:
        UserError: if the folder cannot be written.
    """
    make_folder(folder)
    try:
        target = folder / "config.yaml"
        temporary = folder / "config.yaml.new"
        temporary.write_text(to_yaml(config), encoding="utf-8")
        temporary.replace(target)
    except OSError as error:
        raise UserError(f"{folder}: {error.strerror}") from None
    return target


def to_yaml(config: dict[str, Any]) -> str:
    """Return a configuration as a user would write it."""
    return str(yaml.safe_dump(config, sort_keys=False, default_flow_style=None, width=110, allow_unicode=True))


def data_digests(config: dict[str, Any]) -> dict[str, str]:
    """Return the content digest of every data file that the run's hubs read.

    Raises:
        UserError: if a file cannot be read.
    """
    digests: dict[str, str] = resolve("digests", DATA_DIGESTS, {})(config)
    return digests


class Preparation:
    """Maker of the model that training starts from; blocking, meant for a thread.

    Args:
        config: validated.
        folder: the run's, with its ``config.yaml``.
        say: receives progress messages for users.
        make_warm_start: make a missing warm start; False for a run whose checkpoint replaces its weights.
    """

    def __init__(self, config: dict[str, Any], folder: Path, say: Say, *, make_warm_start: bool = True) -> None:
        self._config, self._folder, self._say, self._make_warm_start = config, folder, say, make_warm_start
        self._model = section(config, "model", ModelSection)
        self._warm = section(config, "warm_start", WarmStartSection)
        self._run = section(config, "run", RunSection)
        self._stopped = threading.Event()

    def stop(self) -> None:
        """Stop soon; ``model_path`` raises Interrupted."""
        self._stopped.set()

    def model_path(self) -> str:
        """Return the folder or hub name of the first weights; reuse those of an earlier start of this run.

        Raises:
            UserError: if there is no such model, demonstrations cannot be generated, or the warm start diverged.
            Interrupted: if a stop was requested.
        """
        out = self._folder / "warm_start"
        if (out / "config.json").exists() and (self._warm.steps or not self._make_warm_start):
            return str(out)
        path = self._base_model()
        if not self._warm.steps:
            return path
        if not self._make_warm_start:
            log.info("no warm start: the checkpoint that the run resumes from would replace its weights")
            return path
        # Importing torch takes seconds: do it while another process generates the demonstrations.
        importing = threading.Thread(target=import_module, args=("learner.offline.sft",), name="import-sft", daemon=True)
        importing.start()
        data = self._demonstrations()
        importing.join()  # two threads importing transformers at once may see it half-imported
        self._train(path, data, out)
        return str(out)

    def _base_model(self) -> str:
        if self._model.path is not None:
            from text.config import check_model_path

            check_model_path(self._model.path)
            local = Path(self._model.path).expanduser()
            return str(local.absolute()) if local.is_dir() else self._model.path
        out = self._folder / "model"
        if not (out / "config.json").exists():
            self._say("building the model")
            from text.tiny import build_tiny

            build_tiny(out, self._model.tiny, seed=self._model.seed, dtype=self._model.dtype)
        return str(out)

    def _demonstrations(self) -> str:
        """Return the file that the warm start trains on."""
        if self._warm.data is not None:
            return self._warm.data
        out, output = self._folder / "demos.jsonl", self._folder / "demos.log"
        if out.exists():
            return str(out)
        self._say(f"generating {self._warm.episodes} demonstrations")
        domain = ["--domain", self._warm.domain] if self._warm.domain else []
        arguments = ["--episodes", str(self._warm.episodes), "--noise", str(self._warm.noise), "--seed", str(self._run.seed)]
        command = [sys.executable, "-m", "envhub.cli", "demos", str(self._folder / "config.yaml"), *domain, *arguments, "--out", str(out)]
        with output.open("wb") as file:
            code = self._wait(command, file)
        lines = output.read_text(errors="replace").splitlines()
        if code == 2 and (errors := [line for line in lines if line.startswith("error: ")]):
            raise UserError(errors[-1].removeprefix("error: "))
        if code != 0:
            raise UserError(f"envhub demos failed, exit code {code}: {lines[-1] if lines else 'no output'} (see {output})")
        return str(out)

    def _wait(self, command: list[str], output: IO[bytes]) -> int:
        child = spawn(command, output)
        while child.poll() is None:
            if self._stopped.wait(0.05):
                child.terminate()
                child.wait()
                raise Interrupted
        return child.returncode

    def _train(self, path: str, data: str, out: Path) -> None:
        from learner.offline.sft import run_sft

        train = section(self._config, "train", TrainSection)
        self._say("warm start")

        def on_step(step: int, values: dict[str, float]) -> None:
            if self._stopped.is_set():
                raise Interrupted
            if step % 10 == 0 or step == self._warm.steps:
                self._say(f"warm start, step {step} of {self._warm.steps}, loss {values['loss']:.3f}")

        result = run_sft(
            path,
            data,
            str(out),
            steps=self._warm.steps,
            batch_size=self._warm.batch_size,
            lr=self._warm.lr,
            seed=self._run.seed,
            num_threads=train.num_threads,
            on_step=on_step,
            micro_batch_tokens=train.micro_batch_tokens,
            dtype=self._model.dtype,
            device=train.device,
            trust_remote_code=self._model.trust_remote_code,
        )
        log.info("warm start: %d steps in %.1f s, loss %.3f", result["steps"], result["seconds"], result["loss"])
