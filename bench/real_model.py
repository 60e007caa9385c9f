"""Train a small pretrained model on generated tasks, and compare held-out success before and after.

    make real-model
    python -m bench.real_model [--recipes additions,lora,words,forms] [--seeds 1] [--out runs/real_model] [--report]
                               [--results FOLDER]

Each recipe is a run of ``rlearner up`` on two cores. Its two evaluations use the same held-out
tasks, prompts, sampling and rule. Additions run with every seed, other recipes with the first; the
evaluation at the start is that of the first seed. The result of a finished run is a file in the
output folder, or in that of ``--results``, and the run is not repeated. With
``--results bench/results/real_model``, where the published ones are, the table and the picture in
docs/learning.md are written. The last line is one JSON object:

- ``success_start``, ``success_end``: of two-digit additions, over all seeds; ``seeds``: the end of
  each.
- ``minutes``: of the slowest run of additions, from its start to its end, both evaluations
  included; ``cpu_minutes``: of processor time, of which two idle cores give two a minute.
- ``rows``: start, end and 95 % intervals of the other recipes; ``above``: whether the end's is
  above the start's.
- ``false_refusals``: of engine hf, which loads the model in float32 and in bfloat16.

``--tiny`` runs two steps of a model with random weights, which needs no download and learns
nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench.support import real_model_report
from broker.errors import UserError
from broker.system.private_files import private_write
from learner.evaluation import pass_at_k

MODEL: Final = "models/smollm2-135m-instruct"
DTYPES: Final = ("float32", "bfloat16")
ADDITIONS: Final = "additions"


@dataclass(frozen=True)
class Recipe:
    """A configuration, its overrides, and the recipe that begins with the same evaluation (itself
    by default).
    """

    config: str
    overrides: tuple[str, ...] = ()
    start: str = ""


RECIPES: Final[Mapping[str, Recipe]] = {
    ADDITIONS: Recipe("configs/arithmetic.yaml"),
    "lora": Recipe(
        "configs/arithmetic.yaml", ("train.lora.rank=16", "train.lr=4e-4"), start=ADDITIONS
    ),
    "words": Recipe("configs/word_problems.yaml"),
    "forms": Recipe("configs/instructions.yaml"),
}
TINY: Final = (
    "train.warmup_steps=0",
    *(
        "train.steps=2",
        "train.groups_per_step=2",
        "eval.every_steps=2",
        "eval.tasks=4",
        "checkpoint.every_steps=2",
    ),
    "envhub.n=16",
)


def overrides_of(name: str, seed: int, options: argparse.Namespace) -> list[str]:
    """Return the settings of a run, without its name and folder."""
    recipe = RECIPES[name]
    has_start = seed == 0 and (not recipe.start or recipe.start not in options.recipes)
    found = [*recipe.overrides, f"run.seed={seed}", f"eval.at_start={json.dumps(has_start)}"]
    return [*found, *TINY] if options.tiny else [*found, f"model.path={options.model}"]


def run_recipe(name: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Run a recipe with one seed, unless its result is there, and return the result.

    Raises:
        UserError: if the run fails.
    """
    overrides = overrides_of(name, seed, options)
    file = options.results / f"{name}.seed{seed}.json"
    if (result := read_result(file, overrides)) is not None:
        return result
    if options.report:
        raise UserError(f"{file}: there is no result with these settings; leave out --report")
    run = f"{name}-{seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    command = [sys.executable, "-m", "rlearner.cli", "up", RECIPES[name].config, *overrides]
    print(f"{run}: {' '.join(command[3:])}", flush=True)
    began = time.monotonic()
    load = os.getloadavg()[0]
    used_s = children_s()
    done = subprocess.run([*command, f"run.name={run}", f"run.dir={options.out}"], check=False)
    if done.returncode:
        raise UserError(f"{options.out / run}: rlearner up ended with exit code {done.returncode}")
    minutes = (time.monotonic() - began) / 60
    result = {
        "overrides": overrides,
        "minutes": round(minutes, 2),
        "cpu_minutes": round((children_s() - used_s) / 60, 2),
        "load": [round(load, 1), round(os.getloadavg()[0], 1)],
        **read_run(options.out / run),
    }
    private_write(file, (json.dumps(result) + "\n").encode())
    return result


def children_s() -> float:
    """Return the processor time in seconds of the processes that this one has waited for, and
    theirs.
    """
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def read_result(file: Path, overrides: Sequence[str]) -> dict[str, Any] | None:
    """Return the stored result of a run with these settings, None if there is none."""
    try:
        result: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return result if result["overrides"] == list(overrides) else None


def read_run(folder: Path) -> dict[str, Any]:
    """Return each step's training success and sampled tokens, and the success on each task of each
    evaluation.
    """
    lines = [
        json.loads(line)
        for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    steps = [line for line in lines if "env/success_rate" in line]
    return {
        "curve": [round(line["env/success_rate"], 4) for line in steps],
        "tokens_per_s": round(
            sum(line.get("perf/tokens_per_s", 0.0) for line in steps) / max(len(steps), 1), 1
        ),
        "evaluations": {
            str(int(file.stem.rpartition("-")[2])): read_evaluation(file)
            for file in sorted((folder / "evals").glob("actor-step-*.jsonl"))
        },
    }


def read_evaluation(file: Path) -> dict[str, bool]:
    """Return whether each task of an evaluation succeeded, by its number; each has one episode."""
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return {str(row["task_index"]): bool(row["success"][0]) for row in rows}


def success(evaluations: Sequence[Mapping[str, bool]]) -> dict[str, Any]:
    """Return the mean success of several runs on the tasks that all have measured, and its 95 %
    interval.
    """
    common = set[str].intersection(*map(set, evaluations))
    tries = [[tasks[number] for tasks in evaluations] for number in sorted(common, key=int)]
    low, high = pass_at_k.success_interval(tries)
    mean = sum(map(sum, tries)) / (len(tries) * len(evaluations))
    return {
        "success": round(mean, 4),
        "low": round(low, 4),
        "high": round(high, 4),
        "tasks": len(tries),
    }


def last_evaluation(run: Mapping[str, Any]) -> dict[str, bool]:
    """Return the evaluation after the last step."""
    evaluations: dict[str, dict[str, bool]] = run["evaluations"]
    return evaluations[max(evaluations, key=int)]


def row_of(start: Mapping[str, Any], runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a recipe's success before the first step of ``start`` and after the last one of its
    runs.
    """
    first = success([start["evaluations"]["0"]])
    last = success(list(map(last_evaluation, runs)))
    return {
        "start": first,
        "end": last,
        "above": last["low"] > first["high"],
        "minutes": max(run["minutes"] for run in runs),
        "cpu_minutes": max(run["cpu_minutes"] for run in runs),
        "tokens_per_s": runs[0]["tokens_per_s"],
        "load": [run["load"] for run in runs],
    }


async def false_refusals(model: str) -> int:
    """Return how many of the dtypes the engine hf refuses to run the model in."""
    from rollout.config import RolloutSection
    from rollout.engines.base import EngineConfig
    from rollout.engines.hf.engine import HFEngine

    count = 0
    for dtype in DTYPES:
        section = RolloutSection(max_running=4, max_context_tokens=256)
        engine = HFEngine(EngineConfig(model, section, policy_version=0, dtype=dtype))
        try:
            await engine.start()
        except UserError as error:
            print(f"{dtype}: {error}", file=sys.stderr)
            count += 1
        else:
            await engine.close()
    return count


def tiny_model(folder: Path) -> str:
    """Make a model with random weights and return its folder."""
    from rlearner_text.config import TinyModel
    from rlearner_text.tiny import build_tiny

    target = folder / "tiny"
    if not (target / "config.json").exists():
        build_tiny(
            target,
            TinyModel(
                hidden_size=32, num_layers=1, num_kv_heads=1, head_dim=16, intermediate_size=48
            ),
        )
    return str(target)


def names(text: str) -> list[str]:
    """Return the recipes of an option."""
    chosen = text.split(",")
    if unknown := [name for name in chosen if name not in RECIPES]:
        raise argparse.ArgumentTypeError(
            f"{unknown[0]!r} is not allowed; one of {', '.join(RECIPES)}, with commas"
        )
    return chosen


def whole_number(text: str) -> int:
    """Return a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; a whole number of at least 1")
    return int(text)


def main(arguments: list[str] | None = None) -> int:
    """Run what is missing and report; return 2 if a run fails, 1 if it has learned too little."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.real_model",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--recipes",
        "--only",
        type=names,
        default=list(RECIPES),
        metavar="NAMES",
        help=f"of {','.join(RECIPES)}",
    )
    add(
        "--seeds",
        type=whole_number,
        default=1,
        help="of additions; other recipes run once (%(default)s)",
    )
    add("--model", default=MODEL, metavar="FOLDER", help="the pretrained model (%(default)s)")
    add(
        "--out",
        type=Path,
        default=Path("runs/real_model"),
        help="folder of the runs (%(default)s)",
    )
    add(
        "--results",
        type=Path,
        metavar="FOLDER",
        help="keep results there (in --out), and write the table and the picture of the docs",
    )
    add("--docs", type=Path, default=Path("docs"), help="folder of learning.md (%(default)s)")
    add("--report", action="store_true", help="run nothing: report what is there")
    add(
        "--at-least",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="exit code 1 if additions end with less success (%(default)s)",
    )
    add(
        "--tiny",
        action="store_true",
        help="two steps of a model with random weights, without a report",
    )
    options = parser.parse_args(arguments)
    options.out = options.out.absolute()
    is_published = options.results is not None
    options.results = options.results or options.out
    try:
        figures = measure(options, is_published=is_published)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(figures))
    return int(figures.get("success_end", 1.0) < options.at_least)


def measure(options: argparse.Namespace, *, is_published: bool = False) -> dict[str, Any]:
    """Run the recipes and return the figures.

    Args:
        is_published: write the table and the picture of the docs.

    Raises:
        UserError: if there is no model, or a run fails.
    """
    if not options.tiny and not Path(options.model, "config.json").is_file():
        raise UserError(f"{options.model}: no model there; `make real-model` writes {MODEL}")
    options.out.mkdir(parents=True, exist_ok=True)
    options.results.mkdir(parents=True, exist_ok=True)
    runs = {
        name: [
            run_recipe(name, seed, options)
            for seed in range(options.seeds if name == ADDITIONS else 1)
        ]
        for name in options.recipes
    }
    rows = {}
    for name, found in runs.items():
        start = RECIPES[name].start
        rows[name] = row_of(runs[start][0] if start in runs else found[0], found)
    figures: dict[str, Any] = {
        "rows": {name: row for name, row in rows.items() if name != ADDITIONS}
    }
    if (additions := rows.get(ADDITIONS)) is not None:
        ends = [success([last_evaluation(run)])["success"] for run in runs[ADDITIONS]]
        figures = {
            "success_start": additions["start"]["success"],
            "success_end": additions["end"]["success"],
            "interval_start": [additions["start"]["low"], additions["start"]["high"]],
            "interval_end": [additions["end"]["low"], additions["end"]["high"]],
            "seeds": ends,
            "minutes": additions["minutes"],
            "cpu_minutes": additions["cpu_minutes"],
            "tokens_per_s": additions["tokens_per_s"],
            "load": additions["load"],
            **figures,
        }
    figures["false_refusals"] = asyncio.run(
        false_refusals(tiny_model(options.out) if options.tiny else options.model)
    )
    if is_published:
        real_model_report.write(options.docs, rows, runs)
    return figures


if __name__ == "__main__":
    sys.exit(main())
