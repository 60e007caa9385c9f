"""Compare distillation from a served teacher with GRPO.

    python -m bench.distill [--lrs 0.001,0.002,0.004]

A teacher learns the quickstart's lakes from good demonstrations. A smaller student then starts from
bad ones, once for each method and learning rate, with the same evaluations: the teacher alone
trains it (``configs/teacher.yaml``), or rewards alone (GRPO). Each run is a ``rlearner up``. One
more distillation has its teacher's server killed (SIGKILL) during the run. The last line is one
JSON object:

- ``teacher``, ``student_start``, ``student_end``, ``grpo_end``: success on 256 held-out lakes; the
  ends at each method's best learning rate.
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

from broker.errors import UserError
from learner.reporting.metrics import read_lines, step_of

LRS: Final = (1e-3, 2e-3, 4e-3)
KILLS: Final = 3
MARGIN: Final = 0.05  # below the teacher that counts as reaching it
SUCCESS: Final = "eval/success_rate"
TEACHER: Final = ("warm_start.noise=0.05", "warm_start.steps=600", "warm_start.episodes=1024")
GRPO: Final = (
    'domains.lake.teacher=""',
    "teachers.big=null",
    "algorithm={adv_estimator: grpo, pg_variant: ppo}",
    "domains.lake.group_size=8",
)


@dataclass(frozen=True)
class Scale:
    """Steps of the runs, and held-out tasks of their evaluations."""

    teacher_steps: int = 40
    steps: int = 40
    grpo_steps: int = 160
    tasks: int = 256
    lrs: Sequence[float] = LRS
    kills: int = KILLS
    overrides: tuple[str, ...] = ()


SMALL: Final = Scale(
    teacher_steps=1,
    steps=2,
    grpo_steps=2,
    tasks=8,
    lrs=LRS[:1],
    kills=0,
    overrides=("warm_start.steps=2", "warm_start.episodes=8", "train.groups_per_step=2"),
)


@dataclass(frozen=True)
class Evaluated:
    """Success after a number of trained episodes."""

    samples: int
    success: float


def run_up(
    folder: Path, name: str, config: str, overrides: Sequence[str], *, kills: int = 0
) -> list[dict[str, Any]]:
    """Run ``rlearner up`` and return the lines of its metrics.

    Args:
        kills: times to kill the teacher's server, once after each of as many steps.

    Raises:
        UserError: if the run fails.
    """
    run = [f"run.dir={folder}", f"run.name={name}"]
    command = [sys.executable, "-m", "rlearner.cli", "up", config, *overrides, *run, "--json"]
    print(f"{name}: {' '.join(overrides)}", file=sys.stderr, flush=True)
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
        raise UserError(f"{folder / name}: ended with exit code {process.returncode}{missing}")
    return read_lines(folder / name / "metrics.jsonl")


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


def measure(folder: Path, scale: Scale) -> dict[str, Any]:
    """Run everything and return the figures."""
    began = time.monotonic()
    common = [f"eval.tasks={scale.tasks}", 'eval.baseline=""', *scale.overrides]
    steps = f"train.steps={scale.teacher_steps}"
    ends = [
        f"eval.every_steps={scale.teacher_steps}",
        f"checkpoint.every_steps={scale.teacher_steps}",
    ]
    rows = run_up(folder, "teacher", "configs/quickstart.yaml", [*TEACHER, *common, steps, *ends])
    teacher = [row[SUCCESS] for row in rows if SUCCESS in row][-1]
    weights = folder / "teacher" / "checkpoints" / f"step-{scale.teacher_steps:06d}"
    taught = [f"teachers.big.model_path={weights}", *common]
    student = "configs/teacher.yaml"
    curves: dict[str, list[list[Evaluated]]] = {"distill": [], "grpo": []}
    for number, lr in enumerate(scale.lrs):
        distill = [*taught, f"train.lr={lr}", f"train.steps={scale.steps}", "eval.every_steps=2"]
        rows = run_up(folder, f"distill-{number}", student, [*distill, "eval.at_start=true"])
        curves["distill"].append(read_evaluations(rows, episodes_of(folder / f"distill-{number}")))
        grpo = [*common, *GRPO, f"train.lr={lr}", f"train.steps={scale.grpo_steps}"]
        every = f"eval.every_steps={max(scale.grpo_steps // 16, 1)}"
        rows = run_up(folder, f"grpo-{number}", student, [*grpo, every, "eval.at_start=true"])
        curves["grpo"].append(read_evaluations(rows, episodes_of(folder / f"grpo-{number}")))
    figures = compare(teacher, curves)
    killed = [*taught, f"train.steps={scale.steps}", "eval.every_steps=0"]
    rows = run_up(folder, "killed", student, killed, kills=scale.kills)
    tickets = {
        name: rows[-1][f"ticket/{name}"]
        for name in ("issued", "trained", "filtered", "dropped", "dead", "open")
    }
    return {
        "teacher": teacher,
        **figures,
        "teacher_kills": scale.kills,
        "lost": int(2 * tickets["issued"] - sum(tickets.values())),
        "dead": int(tickets["dead"]),
        "minutes": round((time.monotonic() - began) / 60, 1),
    }


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
    parser.add_argument("--out", type=Path, default=Path("runs/distill"), help="folder of the runs")
    options = parser.parse_args()
    folder = options.out.absolute() / time.strftime("%Y%m%d-%H%M%S")
    try:
        scale = SMALL if options.small else Scale(lrs=options.lrs)
        print(json.dumps(measure(folder, scale)))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
