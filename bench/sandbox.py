"""Measure the cost of the sandbox, and try to escape from it.

    python -m bench.sandbox [--pairs 60] [--no-escapes]

A pair is an empty program in the sandbox and an empty Python with the same options outside,
alternating; added_ms is the median of the differences. The last line is one JSON object: added_ms,
escapes_tried, escapes_succeeded; added_least_ms compares the fastest starts, which other load
disturbs less; bare_ms, load and pairs describe the run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

from bench.support.escape_scene import LIMITS, scene
from bench.support.escapes import ESCAPES
from broker.errors import UserError
from rlearner_sandbox import Sandbox
from rlearner_sandbox.command import ENVIRONMENT, python


def bare() -> None:
    """Run an empty Python program with piped outputs."""
    command = [python(), "-I", "-S", "-X", "utf8", "-c", "pass"]
    subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, env=ENVIRONMENT, check=True
    )


def timed(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return 1e3 * (time.perf_counter() - began)


def cost(sandbox: Sandbox, pairs: int) -> dict[str, float]:
    """Return medians over pairs in alternating order, without the warm-up pairs."""
    added = []
    alone = []
    confined = []
    for turn in range(-3, pairs):
        if turn % 2:
            inside = timed(lambda: sandbox.run(""))
            outside = timed(bare)
        else:
            outside = timed(bare)
            inside = timed(lambda: sandbox.run(""))
        if turn >= 0:
            added.append(inside - outside)
            alone.append(outside)
            confined.append(inside)
    figures: dict[str, float] = {"added_ms": round(statistics.median(added), 2)}
    figures |= {"added_least_ms": round(min(confined) - min(alone), 2)}
    return figures | {"bare_ms": round(statistics.median(alone), 2)}


def attempts() -> tuple[int, list[str]]:
    """Return how many escapes were tried and which of them succeeded."""
    sandbox = Sandbox(LIMITS)
    succeeded = []
    for escape in ESCAPES:
        with scene() as here:
            result = escape.inside(sandbox, here)
            if escape.escaped(here, result) or result.how != escape.how:
                how = result.how or "itself"
                stdout = result.stdout[:200]
                print(f"{escape.name}: ended by {how} after {result.seconds:.1f} s, {stdout!r}")
                succeeded.append(escape.name)
    return len(ESCAPES), succeeded


def main() -> int:
    """Measure; return 0 if no escape succeeds."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.sandbox", description="Measure and attack the sandbox."
    )
    parser.add_argument("--pairs", type=int, default=60, help="pairs of starts (60)")
    parser.add_argument("--no-escapes", action="store_true", help="measure the cost alone")
    options = parser.parse_args()
    try:
        load = os.getloadavg()[0]
        figures: dict[str, object] = {
            **cost(Sandbox(), options.pairs),
            "pairs": options.pairs,
            "load": round(load, 1),
        }
        tried, succeeded = (0, []) if options.no_escapes else attempts()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps({**figures, "escapes_tried": tried, "escapes_succeeded": len(succeeded)}))
    return 1 if succeeded else 0


if __name__ == "__main__":
    sys.exit(main())
