"""Compare ``rlearner advise`` with what twelve simulated fleets do: ``python -m bench.advice
[--virtual]``, 4 minutes.

For each fleet: run it, fit the model to its metrics, predict the samples/s after a change, run the
changed fleet. Four fleets are real processes (learner, servers, hubs and reward hubs on a broker,
which sleep instead of computing); the others run in virtual time with the real ledger, slots,
choice of servers and metrics. The true bottleneck of every fleet is found without the model, in
virtual time: of six reliefs, each made and run, the one that gains most.

The last line is one JSON object: ``median_error`` and ``worst_error`` of the predicted samples/s,
``bottleneck_right`` of 12, and a row for each fleet.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from bench.advice.real_run import run_at_once
from bench.advice.speeds import CASES, Case, FleetSpeeds
from bench.advice.virtual_run import run_fleet, settings_of
from broker.settings.run_settings import RunSettings
from rlearner.advise.advice import advice_of, predict_change
from rlearner.advise.fit import fit_run
from rlearner.advise.run_model import STAGES

VIRTUAL_STEPS: Final = 30
REAL_STEPS: Final = 16
GOALS: Final = {"median_error": 0.1, "worst_error": 0.25, "bottleneck_right": 11}

Rows = Sequence[Mapping[str, Any]]


def measured(rows: Rows, staleness: int) -> float:
    """Return the samples/s of a run, without its first and last steps, in which fewer tickets are
    out.
    """
    used = [row for row in rows if staleness + 2 < row["step"] <= len(rows) - staleness - 1]
    seconds = [row["time/step"] for row in used]
    samples = sum(row["perf/samples_per_s"] * time for row, time in zip(used, seconds, strict=True))
    return float(samples / sum(seconds))


def virtual(speeds: FleetSpeeds) -> float:
    """Return the samples/s of a fleet in virtual time."""
    return measured(run_fleet(speeds, VIRTUAL_STEPS), speeds.max_staleness)


def true_bottleneck(speeds: FleetSpeeds) -> str:
    """Return the stage whose relief gains most."""
    return max(STAGES, key=lambda stage: virtual(speeds.relieved(stage)))


def compare(case: Case, rows: Rows, settings: RunSettings, true: float) -> dict[str, Any]:
    """Return the row of a fleet, given its metrics and the samples/s of the changed one."""
    run = fit_run(rows, settings)
    predicted = predict_change(run, case.change).samples_per_s
    found = advice_of(run)
    row: dict[str, Any] = {"fleet": case.name, "real": case.is_real, "change": case.change}
    row |= {
        "samples_per_s": round(run.samples_per_s, 1),
        "predicted": round(predicted, 1),
        "true": round(true, 1),
    }
    row |= {"error": round(abs(predicted / true - 1), 3), "explained": round(run.explained, 2)}
    row |= {
        "bottleneck": found.bottleneck,
        "true_bottleneck": true_bottleneck(case.speeds),
        "line": found.line,
    }
    print(json.dumps(row), flush=True)
    return row


def in_virtual_time(case: Case) -> dict[str, Any]:
    rows = run_fleet(case.speeds, VIRTUAL_STEPS)
    settings = settings_of(case.speeds, VIRTUAL_STEPS)
    return compare(case, rows, settings, virtual(case.changed))


def as_processes(case: Case) -> dict[str, Any]:
    """Run both fleets of a case at the same time, since they only sleep."""
    with tempfile.TemporaryDirectory() as folder:
        (rows, settings), (changed, _) = run_at_once(
            [case.speeds, case.changed], REAL_STEPS, Path(folder)
        )
    return compare(case, rows, settings, measured(changed, case.changed.max_staleness))


def main(argv: Sequence[str] | None = None) -> int:
    about = __doc__.splitlines()[0] if __doc__ else ""
    parser = argparse.ArgumentParser(prog="python -m bench.advice", description=about)
    parser.add_argument(
        "--virtual", action="store_true", help="run every fleet in virtual time only"
    )
    only_virtual = parser.parse_args(argv).virtual
    rows = [
        as_processes(case) if case.is_real and not only_virtual else in_virtual_time(case)
        for case in CASES
    ]
    errors = [row["error"] for row in rows]
    found: dict[str, Any] = {
        "median_error": round(statistics.median(errors), 3),
        "worst_error": max(errors),
    }
    found["bottleneck_right"] = sum(row["bottleneck"] == row["true_bottleneck"] for row in rows)
    found |= {"goals": GOALS, "load": round(os.getloadavg()[0], 1), "rows": rows}
    print(json.dumps(found))
    is_good = (
        found["median_error"] <= GOALS["median_error"]
        and found["worst_error"] <= GOALS["worst_error"]
    )
    return 0 if is_good and found["bottleneck_right"] >= GOALS["bottleneck_right"] else 1


if __name__ == "__main__":
    sys.exit(main())
