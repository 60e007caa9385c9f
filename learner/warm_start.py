"""The weights that training starts from: a model, or one fine-tuned on demonstrations first."""

from __future__ import annotations

import logging
import sys
import threading
from importlib import import_module
from pathlib import Path
from typing import IO

from broker.errors import UserError
from broker.settings.run_settings import RunSettings
from broker.system.children import spawn
from broker.system.private_files import private_write
from learner.prepare import Say, base_model

log = logging.getLogger(__name__)


class PreparationInterrupted(Exception):
    """A stop was requested before the model was ready."""


class ModelPreparation:
    """Maker of the model that training starts from; blocking, meant for a thread.

    Args:
        folder: the run's, with its ``config.yaml``.
        say: receives progress messages for users.
        make_warm_start: make a missing warm start; False if a checkpoint replaces its weights.
    """

    def __init__(
        self, settings: RunSettings, folder: Path, say: Say, *, make_warm_start: bool = True
    ) -> None:
        self._settings = settings
        self._folder = folder
        self._say = say
        self._make_warm_start = make_warm_start
        self._model = settings.model
        self._warm = settings.warm_start
        self._run = settings.run
        self._stopped = threading.Event()

    def stop(self) -> None:
        """Stop soon; ``model_path`` raises ``PreparationInterrupted``."""
        self._stopped.set()

    def model_path(self) -> str:
        """Return the folder or hub name of the first weights; reuse those of an earlier start.

        Raises:
            UserError: if there is no such model, no demonstrations, or the warm start diverged.
            PreparationInterrupted: if a stop was requested.
        """
        out = self._folder / "warm_start"
        if (out / "config.json").exists() and (self._warm.steps or not self._make_warm_start):
            return str(out)
        path = base_model(self._model, self._folder, self._say)
        if not self._warm.steps:
            return path
        if not self._make_warm_start:
            log.info(
                "no warm start: the checkpoint that the run resumes from would replace its weights"
            )
            return path
        # Importing torch takes seconds: do it while another process generates the demonstrations.
        module = ("learner.backends.torch",)
        importing = threading.Thread(
            target=import_module, args=module, name="import-torch", daemon=True
        )
        importing.start()
        data = self._demonstrations()
        # Two threads importing transformers at once may see it half-imported.
        importing.join()
        self._train(path, data, out)
        return str(out)

    def _demonstrations(self) -> str:
        """Return the file that the warm start trains on."""
        if self._warm.data is not None:
            return self._warm.data
        out = self._folder / "demos.jsonl"
        if out.exists():
            return str(out)
        domains = self._settings.demonstrated_domains()
        if len(domains) == 1:
            self._write_demonstrations(domains[0], out)
            return str(out)
        parts = [self._folder / f"demos-{domain}.jsonl" for domain in domains]
        for domain, part in zip(domains, parts, strict=True):
            if not part.exists():
                self._write_demonstrations(domain, part)
        private_write(out, b"".join(part.read_bytes() for part in parts))
        return str(out)

    def _write_demonstrations(self, domain: str, out: Path) -> None:
        warm = self._warm
        output = self._folder / "demos.log"
        config = str(self._folder / "config.yaml")
        self._say(f"generating {warm.episodes} demonstrations of {domain}")
        options = ["--domain", domain, "--episodes", str(warm.episodes)]
        options += ["--noise", str(warm.noise), "--seed", str(self._run.seed), "--out", str(out)]
        command = [sys.executable, "-m", "envhub.cli", "demos", config, *options]
        with output.open("wb") as file:
            code = self._wait(command, file)
        lines = output.read_text(errors="replace").splitlines()
        if code == 2 and (errors := [line for line in lines if line.startswith("error: ")]):
            raise UserError(errors[-1].removeprefix("error: "))
        if code != 0:
            last = lines[-1] if lines else "no output"
            raise UserError(f"envhub demos failed, exit code {code}: {last} (see {output})")

    def _wait(self, command: list[str], output: IO[bytes]) -> int:
        child = spawn(command, output)
        while child.poll() is None:
            if self._stopped.wait(0.05):
                child.terminate()
                child.wait()
                raise PreparationInterrupted
        return child.returncode

    def _train(self, path: str, data: str, out: Path) -> None:
        from learner.offline.config import OfflineTrainSection
        from learner.offline.supervised import fine_tune

        warm = self._warm
        run = self._settings.train
        train = OfflineTrainSection(
            steps=warm.steps,
            batch_size=warm.batch_size,
            lr=warm.lr,
            device=run.device,
            micro_batch_tokens=run.micro_batch_tokens,
            num_threads=run.num_threads,
        )
        self._say("warm start")

        def on_step(step: int, values: dict[str, float]) -> None:
            if self._stopped.is_set():
                raise PreparationInterrupted
            if step % 10 == 0 or step == warm.steps:
                self._say(
                    f"warm start, step {step} of {warm.steps}, loss {values['train/loss']:.3f}"
                )

        result = fine_tune(
            path,
            data,
            out,
            model=self._model,
            train=train,
            seed=self._run.seed,
            max_context=self._settings.rollout.max_context_tokens,
            on_step=on_step,
        )
        log.info(
            "warm start: %d steps in %.1f s, loss %.3f",
            warm.steps,
            result["seconds"],
            result["loss"],
        )
