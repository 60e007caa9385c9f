"""Train the recipes of small models, and compare held-out success before and after.

    python -m bench.curves [--only lakes,transfer] [--out runs/curves] [--results FOLDER] [--report]
                           [--tiny]

Each recipe is a run of ``rlearner up`` on two cores, from its configuration in ``configs``. A
finished run is a file in the output folder, or in that of ``--results``, and is not repeated. With
``--results bench/results/curves``, where the published ones are, the table in docs/learning.md is
written from all that are there. The last line is one JSON object:

- ``rows``: ``name``, ``start``, ``end``, ``interval`` (95 % of the end: low, high), ``random`` (of
  random moves on the same tasks, null where there are none), ``above`` (whether the end exceeds the
  start beyond the interval) and ``minutes``.
- ``not_above``: names of the rows that do not; transfer to a game that is not trained may.

``--tiny`` trains two steps of each, which teaches nothing.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench.support import curves_report
from broker.contract import wire
from broker.errors import UserError
from broker.system.private_files import private_write
from learner.credit.archive import read_frames
from learner.evaluation import pass_at_k
from learner.evaluation.task_results import TaskResult

# Success, or flags of turns, by task or episode.
Tries = list[list[bool]]


@dataclass(frozen=True)
class Recipe:
    """A configuration, and what is measured of it.

    Attributes:
        domains: rows of the table by domain.
        valid: also measure which share of the turns are actions, in the first and last groups.
    """

    config: str
    domains: Mapping[str, str]
    overrides: tuple[str, ...] = ()
    valid: str = ""


RECIPES: Final[Mapping[str, Recipe]] = {
    "lakes": Recipe("configs/quickstart.yaml", {"lake": "frozen lakes, 4x4"}),
    "number_line": Recipe("configs/number_line.yaml", {"line": "NumberLine, 0 to 14"}),
    "valid_actions": Recipe(
        "configs/valid_actions.yaml",
        {"lake": "frozen lakes, from few demonstrations"},
        ("samples.keep=true",),
        valid="the same: share of turns that are actions",
    ),
    "transfer": Recipe(
        "configs/transfer.yaml",
        {"lake": "frozen lakes, with 64 Sokoban levels", "sokoban": "Sokoban, never trained"},
    ),
    "webshop": Recipe("configs/webshop.yaml", {"shop": "a generated web shop"}),
    "sokoban": Recipe("configs/sokoban.yaml", {"sokoban": "Sokoban, 6x6"}),
    "programs": Recipe("configs/programs.yaml", {"programs": "tiny programs in the sandbox"}),
    "several": Recipe(
        "configs/several.yaml",
        {
            "lake": "three domains in one run: frozen lakes",
            "line": "three domains: NumberLine",
            "programs": "three domains: tiny programs",
        },
    ),
}
TINY: Final = (
    "train.steps=2",
    "train.groups_per_step=2",
    "train.warmup_steps=0",
    "eval.every_steps=2",
    "eval.tasks=4",
    "checkpoint.every_steps=2",
    "warm_start.steps=2",
    "warm_start.episodes=8",
    "envhub.n=16",
)


def run_recipe(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run a recipe, unless its result is there, and return the result.

    Raises:
        UserError: if the run fails, or is missing and not to be run.
    """
    recipe = RECIPES[name]
    overrides = overrides_of(name, options)
    if (stored := find_result(name, options)) is not None:
        return stored
    if options.report:
        file = options.results / f"{name}.json"
        raise UserError(f"{file}: there is no result with these settings; leave out --report")
    run = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    command = [sys.executable, "-m", "rlearner.cli", "up", recipe.config, *overrides]
    print(f"{run}: {' '.join(command[3:])}", file=sys.stderr, flush=True)
    began = time.monotonic()
    place = [f"run.name={run}", f"run.dir={options.out}"]
    done = subprocess.run([*command, *place], check=False, stdout=sys.stderr)
    if done.returncode:
        raise UserError(f"{options.out / run}: rlearner up ended with exit code {done.returncode}")
    minutes = round((time.monotonic() - began) / 60, 2)
    rows = measure_run(name, options.out / run, minutes)
    result = {"overrides": overrides, "rows": rows}
    private_write(options.results / f"{name}.json", (json.dumps(result) + "\n").encode())
    return result


def overrides_of(name: str, options: argparse.Namespace) -> list[str]:
    """Return the settings of a recipe that differ from its configuration."""
    return [*RECIPES[name].overrides, *(TINY if options.tiny else ()), "eval.at_start=true"]


def find_result(name: str, options: argparse.Namespace) -> dict[str, Any] | None:
    """Return the stored result of a recipe with its present settings, None if there is none."""
    file = options.results / f"{name}.json"
    if not file.is_file():
        return None
    stored: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return stored if stored["overrides"] == overrides_of(name, options) else None


def measure_run(name: str, run: Path, minutes: float) -> list[dict[str, Any]]:
    """Return the rows of a finished run."""
    recipe = RECIPES[name]
    first, last = evaluations_of(run, wire.ACTOR)
    baselines = evaluations_of(run, "random")
    rows = []
    for domain, title in recipe.domains.items():
        baseline = mean_of(baselines[0][domain]) if baselines and domain in baselines[0] else None
        row_name = name if len(recipe.domains) == 1 else f"{name}_{domain}"
        rows.append(make_row(row_name, title, first[domain], last[domain], baseline))
    if recipe.valid:
        groups = valid_turns(run)
        row = make_row(f"{name}_valid", recipe.valid, groups[0], groups[-1], None)
        rows.append(row)
    return [row | {"minutes": minutes} for row in rows]


def evaluations_of(run: Path, policy: str) -> list[dict[str, Tries]]:
    """Return the first and the last evaluation of a policy by domain, nothing if it has none."""
    files = sorted((run / "evals").glob(f"{policy}-step-*.jsonl"))
    evaluations = []
    for file in files[:1] + files[-1:]:
        tries: dict[str, Tries] = {}
        for line in file.read_text(encoding="utf-8").splitlines():
            result = TaskResult.of_row(json.loads(line))
            tries.setdefault(result.domain, []).append(list(result.successes))
        evaluations.append(tries)
    return evaluations


def valid_turns(run: Path, num_groups: int = 16) -> tuple[Tries, Tries]:
    """Return whether each turn was an action, of the first and last groups' episodes."""
    messages = [frame.record().message for frame in read_frames(run / "samples")]
    groups = [message for message in messages if isinstance(message, wire.Group)]
    ends = (groups[:num_groups], groups[-num_groups:])
    first, last = (
        [
            [turn.valid for turn in trajectory.turns]
            for group in part
            for trajectory in group.trajectories
        ]
        for part in ends
    )
    return first, last


def mean_of(tries: Tries) -> float:
    """Return the mean of the means."""
    return sum(sum(each) / len(each) for each in tries) / len(tries)


def make_row(
    name: str, title: str, start: Tries, end: Tries, baseline: float | None
) -> dict[str, Any]:
    """Return a row of the table."""
    low, high = pass_at_k.success_interval(end)
    first = mean_of(start)
    return {
        "name": name,
        "title": title,
        "start": round(first, 4),
        "end": round(mean_of(end), 4),
        "interval": [round(low, 4), round(high, 4)],
        "random": None if baseline is None else round(baseline, 4),
        "above": low > first,
    }


def parse_names(text: str) -> list[str]:
    """Return the recipes of an option."""
    chosen = text.split(",")
    if unknown := [name for name in chosen if name not in RECIPES]:
        raise argparse.ArgumentTypeError(
            f"{unknown[0]!r} is not allowed; one of {', '.join(RECIPES)}, with commas"
        )
    return chosen


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is missing and report; return 2 if a run fails."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.curves",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--only",
        type=parse_names,
        default=list(RECIPES),
        metavar="NAMES",
        help=f"of {','.join(RECIPES)}",
    )
    add("--out", type=Path, default=Path("runs/curves"), help="where results are kept")
    add("--results", type=Path, help="keep results there (in --out), and write the table")
    add("--docs", type=Path, default=Path("docs"), help="folder of learning.md (%(default)s)")
    add("--report", action="store_true", help="run nothing: report what is there")
    add("--tiny", action="store_true", help="two steps of each, without a report")
    options = parser.parse_args(arguments)
    options.out = options.out.absolute()
    is_published = options.results is not None
    options.results = (options.results or options.out).absolute()
    for folder in (options.out, options.results):
        folder.mkdir(parents=True, exist_ok=True)
    try:
        rows = [row for name in options.only for row in run_recipe(name, options)["rows"]]
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if is_published and not options.tiny:
        results = [find_result(name, options) for name in RECIPES]
        published = [row for result in results if result is not None for row in result["rows"]]
        curves_report.write(options.docs, published)
    print(json.dumps({"rows": rows, "not_above": [r["name"] for r in rows if not r["above"]]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
