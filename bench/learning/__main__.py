"""Train every algorithm on the quickstart's task, from the same warm start on equal samples; then
vary the staleness.

    python -m bench.learning [--quick] [--only NAMES] [--seeds 3] [--workers 2] [--out runs/learning] [--report]

Each run is learner and engine in one process over the real ledger, on one core; a finished run is
one file in the output folder and is not repeated. `--quick` is one seed of every algorithm. Without
it the tables and the plot in docs/learning.md are written. The last line is one JSON object:
algorithms (start, end, ratio of each) and staleness (success and seconds of each loss and
lateness).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.learning import pool, report, settings
from bench.learning.figures import algorithm_rows, loss_at, staleness_rows
from broker.errors import UserError
from broker.settings.arguments import names
from broker.settings.run_settings import RunSettings
from broker.settings.runspec import load, validate


def warm_start(folder: Path, context: str) -> str:
    """Make the warm start of a context from demonstrations with the prompts that the arms will see."""
    from learner.prepare import write_config
    from learner.warm_start import ModelPreparation

    name = "warm" if context == "full" else f"warm_{context}"
    own = [f"domains.lake.context={context}", f"run.name={name}", f"run.dir={folder}"]
    config = validate(load(settings.CONFIG, [*settings.COMMON, *own]))
    write_config(folder / name, config)
    return ModelPreparation(
        RunSettings.of_config(config),
        (folder / name).absolute(),
        lambda text: print(text, file=sys.stderr, flush=True),
    ).model_path()


def collect(
    folder: Path, arms: Sequence[settings.ArmSettings]
) -> tuple[dict[str, Any], dict[str, list[list[float]]]]:
    """Return the figures of all finished arms and the curves of the first sweep."""
    starts: dict[str, list[dict[str, Any]]] = {}
    contexts: dict[str, str] = {}
    algorithms: dict[str, list[dict[str, Any]]] = {}
    stale: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for arm in arms:
        if (found := pool.result(folder, arm)) is None:
            continue
        if arm.sweep == "start":
            starts.setdefault(arm.context, []).append(found)
        elif arm.sweep == "algorithms":
            algorithms.setdefault(arm.name, []).append(found)
            contexts[arm.name] = arm.context
        else:
            stale.setdefault(arm.name, {}).setdefault(str(arm.max_staleness), []).append(found)
    rows = staleness_rows(stale)
    begun = {name: starts[context] for name, context in contexts.items() if context in starts}
    figures = {
        "algorithms": algorithm_rows(begun, {name: algorithms[name] for name in begun}),
        "staleness": rows,
    }
    corrected = [name for name in settings.CORRECTED if name in rows]
    figures["corrected_loss_at_4"] = loss_at(rows, corrected, "4")
    return figures, {name: [one["curve"] for one in found] for name, found in algorithms.items()}


def main() -> int:
    """Run missing arms and report; return 0 if every arm has a result."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.learning",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="one seed of every algorithm, no staleness sweep")
    add("--only", type=names, help="these presets, with commas between; all by default")
    add("--seeds", type=int, default=len(settings.SEEDS), help="seeds of each arm (3)")
    add("--workers", type=int, default=os.cpu_count() or 1, help="processes, one core each")
    add("--out", type=Path, default=Path("runs/learning"), help="where results are kept")
    add(
        "--docs",
        type=Path,
        default=None,
        help="folder of learning.md; docs, and with --quick the output folder",
    )
    add("--report", action="store_true", help="run nothing: report what is there")
    options = parser.parse_args()
    folder = options.out.absolute()
    arms = settings.plan(range(options.seeds), quick=options.quick, names=options.only)
    try:
        if not options.report:
            starts = {context: warm_start(folder, context) for context in settings.CONTEXTS}
            pool.run(arms, folder, starts, options.workers)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    figures, curves = collect(folder, arms)
    report.write(options.docs or (folder if options.quick else Path("docs")), figures, curves)
    print(json.dumps(figures))
    return 0 if all(pool.result(folder, arm) is not None for arm in arms) else 1


if __name__ == "__main__":
    sys.exit(main())
