"""Fill the matrix of model families by running each: ``python -m bench.families [FAMILY ...]
[--write]``.

Every family is a small random model of the real configuration class, in float32 and bfloat16; every
cell runs the project's own engine and learner on it and compares with plain transformers, one
sequence at a time. Then ``rlearner check`` and ``rlearner plan`` must refuse exactly what does not
work, with its reason. The last line is one JSON object.

``--write`` replaces rlearner_text/families.json and docs/models.md by what was found.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from pathlib import Path
from typing import Any, Final

os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # a child of a fork has no other threads

import msgspec
import torch

from bench.families import docs
from bench.families.architectures import Architecture, build
from bench.families.pool import Job, run_jobs
from bench.families.program_checks import COMMANDS, Answer, ask
from bench.families.scene import Scene
from bench.families.summary import Summary, figures, matrix_of, row_of
from bench.families.table import ARCHITECTURES
from bench.families.verdicts import CELLS, DTYPES, Verdict, reason_of
from rlearner_text import families

WORKERS: Final = 2


def main(arguments: list[str] | None = None) -> int:
    """Run, report, and return 1 if a number does not hold."""
    parser = argparse.ArgumentParser(prog="python -m bench.families", description=__doc__)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help="rows to run, all by default")
    parser.add_argument(
        "--cells", nargs="+", choices=list(CELLS), default=list(CELLS), help="all by default"
    )
    parser.add_argument(
        "--write", action="store_true", help="replace families.json and docs/models.md"
    )
    parser.add_argument("--workers", type=int, default=WORKERS, help="processes at a time")
    parser.add_argument("--verbose", action="store_true", help="print each cell as it ends")
    options = parser.parse_args(arguments)
    chosen = [
        each for each in ARCHITECTURES if not options.families or each.name in options.families
    ]
    if unknown := set(options.families) - {each.name for each in chosen}:
        parser.error(
            f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(each.name for each in ARCHITECTURES)}"
        )
    with tempfile.TemporaryDirectory(prefix="families.") as work:
        settings = {"cells": options.cells, "write": options.write, "verbose": options.verbose}
        found = run_matrix(chosen, Path(work), options.workers, **settings)
    print(json.dumps(found))
    return 1 if found["wrong"] or found["refused_late"] or found["missing"] else 0


def run_matrix(
    chosen: list[Architecture],
    work: Path,
    workers: int,
    *,
    cells: list[str],
    write: bool,
    verbose: bool,
) -> dict[str, Any]:
    """Run families and commands, print what does not hold, and return the numbers."""
    start = time.monotonic()
    _quiet()
    verdicts = defaultdict[str, list[Verdict]](list)
    jobs = [
        Job((each, dtype, work / each.name / dtype), list(cells))
        for each in chosen
        for dtype in DTYPES
    ]
    for answer in run_jobs(jobs, _run_cell, _crash, workers):
        verdict = msgspec.convert(answer, Verdict)
        verdicts[verdict.family].append(verdict)
        if verbose:
            _print(verdict)
    before = families.read_matrix() if families.FILE.exists() else None
    rows = [row_of(each, verdicts[each.name], before) for each in chosen]
    if write:
        text = msgspec.json.format(msgspec.json.encode(matrix_of(rows, before)), indent=1)
        families.FILE.write_bytes(text + b"\n")
        families.read_matrix.cache_clear()
        docs.write()
    summary = Summary()
    answers = defaultdict[str, dict[str, Answer]](dict)
    checks = [
        Job((each, DTYPES[0], work / each.name / DTYPES[0]), list(COMMANDS)) for each in chosen
    ]
    for answer in run_jobs(checks, _ask, _crash_of_command, workers):
        answers[answer["family"]][answer["cell"]] = Answer(answer["code"], answer["line"])
    for row in rows:
        summary.judge(row, verdicts[row.name], answers[row.name])
    for row in rows:
        print(_line(row))
    for kind in ("wrong", "refused_late", "needless"):
        for line in getattr(summary, kind):
            print(f"{kind}: {line}")
    return {**figures(rows, chosen, summary), "minutes": round((time.monotonic() - start) / 60, 2)}


def _scene(job: Job) -> Scene:
    if "scene" not in job.state:
        architecture, dtype, folder = job.subject
        if not (folder / "model" / "config.json").exists():
            build(architecture, folder / "model", dtype)
        job.state["scene"] = Scene(folder / "model", dtype)
    scene: Scene = job.state["scene"]
    return scene


def _run_cell(job: Job, cell: str) -> dict[str, Any]:
    architecture, dtype, _ = job.subject
    scene = _scene(job)
    start = time.monotonic()
    try:
        difference = CELLS[cell](scene)
        verdict = Verdict(architecture.name, dtype, cell, "works", difference=difference)
    except Exception as error:  # noqa: BLE001 - it is the verdict
        verdict = Verdict(architecture.name, dtype, cell, *reason_of(error, scene))
    verdict = msgspec.structs.replace(verdict, seconds=round(time.monotonic() - start, 2))
    return msgspec.structs.asdict(verdict)


def _crash(job: Job, cell: str, reason: str) -> dict[str, Any]:
    architecture, dtype, _ = job.subject
    return msgspec.structs.asdict(Verdict(architecture.name, dtype, cell, "broken", reason))


def _ask(job: Job, command: str) -> dict[str, Any]:
    architecture, _, folder = job.subject
    answer = ask(command, folder / "model")
    return {"family": architecture.name, "cell": command, "code": answer.code, "line": answer.line}


def _crash_of_command(job: Job, command: str, reason: str) -> dict[str, Any]:
    return {"family": job.subject[0].name, "cell": command, "code": -1, "line": reason}


def _quiet() -> None:
    from transformers.utils import logging

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    import peft  # noqa: F401 - before children are forked


def _print(verdict: Verdict) -> None:
    head = f"{verdict.family:20} {verdict.dtype:9} {verdict.cell:8} {verdict.seconds:5.1f} s  {verdict.outcome}"
    print(f"{head} {verdict.reason or f'{verdict.difference:.1e}'}", flush=True)


def _line(row: families.Family) -> str:
    cells = " ".join(
        f"{cell}:{'ok' if state == families.WORKS else 'NO'}" for cell, state in row.cells.items()
    )
    return f"{row.name:20} {row.kind:7} {cells}"


if __name__ == "__main__":
    sys.exit(main())
