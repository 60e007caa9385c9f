"""Compare distillation from a served teacher with GRPO.

    python -m bench.distill [--lrs 0.001,0.002,0.004] [--out runs/distill] [--results FOLDER]

A teacher learns the quickstart's lakes from good demonstrations. A smaller student then starts from
bad ones, once for each method and learning rate, with the same evaluations: the teacher alone
trains it (``configs/teacher.yaml``), or rewards alone (GRPO). Each run is a ``rlearner up``; a
finished run is a file in the output folder and is not repeated while its settings are the same. One
more distillation has its teacher's server killed (SIGKILL) during the run. The last line is one
JSON object:

- ``teacher``, ``student_start``, ``student_end``, ``grpo_end``: success on 256 held-out lakes; the
  ends at each method's best learning rate; ``ends``: at each of them.
- ``target``: 0.05 below the teacher, or GRPO's best if that is lower; ``samples``, ``grpo_samples``:
  trained episodes until the first evaluation at the target, at the best learning rate;
  ``samples_ratio``.
- ``teacher_kills``, ``lost``, ``dead``: of the run whose teacher was killed.
- ``minutes``: of everything.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from broker.errors import UserError
from broker.system.private_files import private_write
from learner.reporting.metrics import read_lines, step_of

LRS: Final = (1e-3, 2e-3, 4e-3)
KILLS: Final = 3
MARGIN: Final = 0.05  # below the teacher that counts as reaching it
SUCCESS: Final = "eval/success_rate"
STATES: Final = ("issued", "trained", "filtered", "dropped", "dead", "open")
STUDENT: Final = "configs/teacher.yaml"
TEACHER: Final = ("warm_start.noise=0.05", "warm_start.steps=600", "warm_start.episodes=1024")
GRPO: Final = (
    'domains.lake.teacher=""',
    "teachers.big=null",
    "algorithm={adv_estimator: grpo, pg_variant: ppo}",
    "algorithm.distillation={use: advantage, kl: reverse}",
    "algorithm.num_minibatches=1",
    "domains.lake.group_size=8",
    "train.groups_per_step=16",
)


@dataclass(frozen=True)
class Scale:
    """Steps of the runs, and held-out tasks of their evaluations."""

    teacher_steps: int = 40
    steps: int = 60
    killed_steps: int = 20
    grpo_steps: int = 100
    tasks: int = 256
    lrs: Sequence[float] = LRS
    kills: int = KILLS
    overrides: tuple[str, ...] = ()


SMALL: Final = Scale(
    teacher_steps=1,
    steps=2,
    killed_steps=2,
    grpo_steps=2,
    tasks=8,
    lrs=LRS[:1],
    kills=0,
    overrides=(
        "warm_start.steps=2",
        "warm_start.episodes=8",
        "train.groups_per_step=8",
        "train.warmup_steps=0",
    ),
)


@dataclass(frozen=True)
class Evaluated:
    """Success after a number of trained episodes."""

    samples: int
    success: float


@dataclass(frozen=True)
class RunResult:
    """What is kept of a finished run.

    Attributes:
        settings: its configuration and what was overridden, but where it ran.
        evaluations: of the policy, with the trained episodes before each.
        tickets: number of tickets by state, at the end.
        folder: of the run.
        minutes: wall time.
    """

    settings: list[str]
    evaluations: list[Evaluated]
    tickets: dict[str, int]
    folder: str
    minutes: float

    @property
    def success(self) -> float:
        """Success at the end."""
        return self.evaluations[-1].success


class RunCache:
    """Runs ``rlearner up``, once for each name and settings.

    Args:
        folder: of the runs.
        results: of a file for each finished run.
    """

    def __init__(self, folder: Path, results: Path) -> None:
        self._folder = folder
        self._results = results

    def find_result(self, name: str, settings: list[str]) -> RunResult | None:
        """Return the result of a run with exactly these settings."""
        file = self._results / f"{name}.json"
        if not file.is_file():
            return None
        result = msgspec.json.decode(file.read_bytes(), type=RunResult)
        return result if result.settings == settings else None

    def run(
        self, name: str, config: str, overrides: Sequence[str], *, teacher: str = "", kills: int = 0
    ) -> RunResult:
        """Return a run's result; run it if there is none.

        Args:
            teacher: folder of the teacher's weights.
            kills: times to kill the teacher's server, once after each of as many steps.

        Raises:
            UserError: if the run fails.
        """
        settings = [config, *overrides]
        if (result := self.find_result(name, settings)) is not None:
            return result
        # names of runs have no dots, as rates do
        run = f"{name.replace('.', '_')}-{time.strftime('%Y%m%d-%H%M%S')}"
        place = [f"run.dir={self._folder}", f"run.name={run}"]
        if teacher:
            place.append(f"teachers.big.model_path={teacher}")
        began = time.monotonic()
        run_up([*settings, *place], kills)
        folder = self._folder / run
        rows = read_lines(folder / "metrics.jsonl")
        result = RunResult(
            settings=settings,
            evaluations=read_evaluations(rows, episodes_of(folder)),
            tickets={state: int(rows[-1][f"ticket/{state}"]) for state in STATES},
            folder=str(folder),
            minutes=round((time.monotonic() - began) / 60, 1),
        )
        private_write(self._results / f"{name}.json", msgspec.json.encode(result) + b"\n")
        return result


def run_up(arguments: Sequence[str], kills: int) -> None:
    """Run ``rlearner up``, and kill its teacher's server after each of the first steps.

    Raises:
        UserError: if it fails, or ends before all kills.
    """
    command = [sys.executable, "-m", "rlearner.cli", "up", *arguments, "--json"]
    print(" ".join(command[3:]), file=sys.stderr, flush=True)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        for line in process.stdout:
            server = find_child(process.pid, "teacher-big") if kills else None
            if server is not None and '"figures"' in line:
                os.kill(server, signal.SIGKILL)
                kills -= 1
    if process.returncode or kills:
        missing = f", {kills} kills were left" if kills else ""
        raise UserError(f"rlearner up ended with exit code {process.returncode}{missing}")


def find_child(parent: int, argument: str) -> int | None:
    """Return the child of a process that has an argument, None if there is none."""
    files = Path(f"/proc/{parent}/task").glob("*/children")
    for child in [child for file in files for child in file.read_text().split()]:
        try:
            arguments = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if argument.encode() in arguments:
            return int(child)
    return None


def read_evaluations(rows: Sequence[dict[str, Any]], episodes_per_step: int) -> list[Evaluated]:
    """Return the evaluations of a run, by the trained episodes before each."""
    return [
        Evaluated(int(step_of(row, SUCCESS)) * episodes_per_step, float(row[SUCCESS]))
        for row in rows
        if SUCCESS in row
    ]


def samples_until(evaluations: Sequence[Evaluated], target: float) -> int | None:
    """Return the trained episodes at the first evaluation that reaches a target, None if none."""
    return next((each.samples for each in evaluations if each.success >= target), None)


def compare(
    teacher: float, curves: dict[str, list[list[Evaluated]]], margin: float = MARGIN
) -> dict[str, Any]:
    """Return the figures of both methods, each at its best learning rate.

    Args:
        curves: ``distill`` and ``grpo``, a list of evaluations for each learning rate.
    """
    ends = {method: max(curve[-1].success for curve in sweep) for method, sweep in curves.items()}
    target = min(teacher - margin, ends["grpo"])
    samples: dict[str, int | None] = {}
    for method, sweep in curves.items():
        reached = [samples_until(curve, target) for curve in sweep]
        samples[method] = min((each for each in reached if each is not None), default=None)
    ratio = None
    if samples["distill"] and samples["grpo"]:
        ratio = round(samples["distill"] / samples["grpo"], 3)
    return {
        "student_start": curves["distill"][0][0].success,
        "student_end": ends["distill"],
        "grpo_end": ends["grpo"],
        "target": round(target, 4),
        "samples": samples["distill"],
        "grpo_samples": samples["grpo"],
        "samples_ratio": ratio,
    }


def measure(cache: RunCache, scale: Scale) -> dict[str, Any]:
    """Run what is missing and return the figures."""
    common = [f"eval.tasks={scale.tasks}", 'eval.baseline=""', *scale.overrides]
    student = [f"train.steps={scale.steps}", f"eval.every_steps={max(scale.steps // 10, 1)}"]
    grpo = [f"train.steps={scale.grpo_steps}", f"eval.every_steps={max(scale.grpo_steps // 10, 1)}"]
    teacher, weights = run_teacher(cache, scale, common)
    sweeps: dict[str, list[RunResult]] = {"distill": [], "grpo": []}
    for lr in scale.lrs:
        settings = [*common, *student, f"train.lr={lr}"]
        sweeps["distill"].append(cache.run(f"distill-{lr}", STUDENT, settings, teacher=weights))
        settings = [*GRPO, *common, *grpo, f"train.lr={lr}"]
        sweeps["grpo"].append(cache.run(f"grpo-{lr}", STUDENT, settings))
    settings = [*common, f"train.steps={scale.killed_steps}", "eval.every_steps=0"]
    killed = cache.run("killed", STUDENT, settings, teacher=weights, kills=scale.kills)
    curves = {
        method: [result.evaluations for result in results] for method, results in sweeps.items()
    }
    return {
        "teacher": teacher.success,
        **compare(teacher.success, curves),
        "ends": {
            method: {str(lr): run.success for lr, run in zip(scale.lrs, results, strict=True)}
            for method, results in sweeps.items()
        },
        "teacher_kills": scale.kills,
        "lost": 2 * killed.tickets["issued"] - sum(killed.tickets.values()),
        "dead": killed.tickets["dead"],
        "minutes": round(
            sum(run.minutes for runs in (*sweeps.values(), [teacher, killed]) for run in runs), 1
        ),
    }


def run_teacher(cache: RunCache, scale: Scale, common: list[str]) -> tuple[RunResult, str]:
    """Return the teacher's result, and the folder of its weights."""
    steps = f"train.steps={scale.teacher_steps}"
    every = [f"{section}.every_steps={scale.teacher_steps}" for section in ("eval", "checkpoint")]
    result = cache.run("teacher", "configs/quickstart.yaml", [*TEACHER, *common, steps, *every])
    weights = Path(result.folder) / "checkpoints" / f"step-{scale.teacher_steps:06d}"
    return result, str(weights)


def episodes_of(run: Path, domain: str = "lake") -> int:
    """Return the episodes of one step of a run with one trained domain."""
    from broker.settings.run_settings import RunSettings
    from learner.resume_checks import read_settings

    config = read_settings(run)
    assert config is not None
    settings = RunSettings.of_config(config)
    return settings.train.groups_per_step * settings.domains[domain].group_size


def parse_rates(text: str) -> list[float]:
    """Return the learning rates of an option."""
    try:
        rates = [float(part) for part in text.split(",")]
    except ValueError:
        rates = []
    if not rates or min(rates) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; numbers above 0, with commas")
    return rates


def main() -> int:
    """Print the figures; return 2 if a run fails."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.distill",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--small", action="store_true", help="two steps of each, for CI")
    parser.add_argument(
        "--lrs",
        type=parse_rates,
        default=LRS,
        metavar="RATES",
        help=f"learning rates of both methods ({','.join(map(str, LRS))})",
    )
    parser.add_argument("--out", type=Path, help="folder of the runs (runs/distill)")
    parser.add_argument("--results", type=Path, help="folder of their results (that of the runs)")
    options = parser.parse_args()
    default = "runs/distill-small" if options.small else "runs/distill"
    folder = (options.out or Path(default)).absolute()
    results = (options.results or folder).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    results.mkdir(parents=True, exist_ok=True)
    try:
        scale = SMALL if options.small else Scale(lrs=options.lrs)
        print(json.dumps(measure(RunCache(folder, results), scale)))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
