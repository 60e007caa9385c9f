"""Each side as something that can be told to take steps: TRL in a process that waits, rlearner as
``rlearner up``.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from bench.peers.workload import SAMPLES, Case, config

ROOT: Final = Path(__file__).parents[2]
PACKAGES: Final = ROOT / ".venv-peers"  # what `make peers-env` installs, for PYTHONPATH
PYTHON: Final = sys.executable
WARM_UP: Final = 3  # steps of ours that fill the pipeline
START_S: Final = 240.0
STOP_S: Final = 60.0


@dataclass(frozen=True)
class Measured:
    """What a side did in one turn.

    Attributes:
        rate: samples per second.
        length: mean tokens of an answer.
        trained: whether the weights moved.
        idle: of ours, the shares of time in which learner and server had nothing to do.
    """

    rate: float
    length: float
    trained: bool
    idle: dict[str, float]


class Trl:
    """One process of ``trl_side`` for one case; between turns it waits for a line."""

    def __init__(self, python: str, folder: Path, case: Case, mode: str) -> None:
        self._log = folder / f"trl-{case.name}-{mode}.log"
        path = os.pathsep.join([str(ROOT), str(PACKAGES)])
        # nothing is looked for in a network; two threads, the same number as both of our computing
        # processes have
        env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "2", "HF_HUB_OFFLINE": "1"}
        with self._log.open("wb") as log:
            command = [python, "-m", "bench.peers.trl_side", str(folder), case.name, mode]
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=env,
                cwd=folder,
                text=True,
            )

    def turn(self, steps: int) -> Measured:
        """Take this many steps.

        Raises:
            RuntimeError: if the process ended; with the last line of its log.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(f"{steps}\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise RuntimeError(self.last_words()) from None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(self.last_words())
        said = json.loads(line)
        return Measured(
            said["samples"] / said["seconds"],
            said["tokens"] / said["samples"],
            said["moved"] > 0,
            {},
        )

    def last_words(self) -> str:
        self._process.wait(STOP_S)
        lines = [
            line for line in self._log.read_text(errors="replace").splitlines() if line.strip()
        ]
        return lines[-1] if lines else "it ended without a word"

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def ours(python: str, folder: Path, case: Case, turn: int) -> Measured:
    """Start a run, wait until its pipeline is full, and measure its next steps; then end it.

    Raises:
        RuntimeError: if the run ended early; with the end of its output.
    """
    name = f"{case.name}-{turn}"
    steps = case.steps
    settings = config(folder, case, 10_000)
    settings["run"]["name"] = name
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(settings))
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    log = folder / f"{name}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [python, "-m", "rlearner.cli", "up", str(file)],
            stdout=output,
            stderr=output,
            env=env,
            cwd=folder,
        )
    try:
        lines = _metrics(process, folder / "runs" / name / "metrics.jsonl", WARM_UP + steps, log)
    finally:
        _stop(process)
    seconds = lines[WARM_UP + steps - 1]["time"] - lines[WARM_UP - 1]["time"]
    counted = lines[WARM_UP : WARM_UP + steps]

    def mean(key: str) -> float:
        return statistics.fmean(line[key] for line in counted)

    idle = {"learner": mean("trainer/idle_ratio"), "server": mean("rollouter/idle_ratio")}
    idle |= {"staleness": mean("staleness/mean"), "train_s": mean("time/train")}
    trained = all(line["actor/grad_norm"] > 0 for line in counted)
    return Measured(SAMPLES * steps / seconds, mean("response_length/mean"), trained, idle)


def _metrics(
    process: subprocess.Popen[bytes], path: Path, steps: int, log: Path
) -> list[dict[str, Any]]:
    """Wait for the lines of this many steps."""
    deadline = time.monotonic() + START_S
    known = 0
    while True:
        lines = path.read_text().splitlines() if path.exists() else []
        if len(lines) >= steps:
            return [json.loads(line) for line in lines[:steps]]
        if len(lines) > known:
            deadline = time.monotonic() + START_S
            known = len(lines)
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError("\n".join(log.read_text(errors="replace").splitlines()[-5:]))
        time.sleep(0.25)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Interrupt a run twice, which ends all its processes at once."""
    for _ in range(2):
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            time.sleep(1.0)
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
