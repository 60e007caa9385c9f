"""Index of a run's folder for the console: how long it takes to build, to follow a step, and to
answer.

    python -m bench.console_index                   # 10,000 steps, 100,000 trajectories, about 10 minutes to write
    python -m bench.console_index --steps 1000

The last line is JSON. ``queries_ms`` has the median of each query; ``search_ms`` is that of the
slowest search, ``query_ms`` of the slowest other one, and ``…_cpu_ms`` the same in processor time,
which other work does not disturb.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, get_args

from bench.support.console_run import MadeUpRun, write_run
from rlearner.console.index.answers import Order, TrajectoryFilter
from rlearner.console.index.queries import RunQueries
from rlearner.console.index.run_index import RunIndex

LIVE_STEPS: Final = 100
REPEATS: Final = 7


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=10_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rlearner-bench-") as place:
        figures = asyncio.run(measure(Path(place) / "run", options.steps))
    print(json.dumps(figures))


async def measure(folder: Path, steps: int) -> dict[str, Any]:
    """Return all figures."""
    began = time.perf_counter()
    run = await write_run(folder, steps, until=steps - LIVE_STEPS)
    print(f"wrote {steps - LIVE_STEPS} steps in {time.perf_counter() - began:.0f} s", flush=True)
    index = RunIndex(folder)
    began = time.perf_counter()
    cpu = time.process_time()
    rounds = []
    more = True
    while more:
        at = time.perf_counter()
        more = index.update()
        rounds.append(time.perf_counter() - at)
    built = {
        "build_s": time.perf_counter() - began,
        "build_cpu_s": time.process_time() - cpu,
        "round_s": max(rounds),
    }
    print({name: round(value, 2) for name, value in built.items()}, flush=True)
    followed = await _follow(run, index)
    run.close()
    index.close()
    answers = ask(RunQueries(folder))
    size = index.path.stat().st_size / 2**20
    figures = {name: round(value, 3) for name, value in (built | followed).items()}
    return {"steps": steps, **figures, "database_mib": round(size, 1), **summary(answers)}


async def _follow(run: MadeUpRun, index: RunIndex) -> dict[str, float]:
    """Return milliseconds of processor time of an update with one new step, and of one with nothing
    new.
    """
    with_step = list[float]()
    without = list[float]()
    for _ in range(LIVE_STEPS):
        await run.step()
        for spent in (with_step, without):
            at = time.process_time()
            while index.update():
                pass
            spent.append(1e3 * (time.process_time() - at))
    return {"update_ms": statistics.median(with_step), "idle_update_ms": statistics.median(without)}


def summary(answers: dict[str, tuple[float, float]]) -> dict[str, Any]:
    """Return the slowest search and the slowest other query, by the clock and of the processor, and
    all of them.
    """
    searches = [both for name, both in answers.items() if name.startswith("search ")]
    others = [both for name, both in answers.items() if not name.startswith("search ")]
    slowest: dict[str, Any] = {}
    for name, found in (("search", searches), ("query", others)):
        slowest[f"{name}_ms"], slowest[f"{name}_cpu_ms"] = (
            max(each) for each in zip(*found, strict=True)
        )
    return slowest | {"queries_ms": {name: clock for name, (clock, _) in answers.items()}}


def ask(queries: RunQueries) -> dict[str, tuple[float, float]]:
    """Return the median milliseconds of every kind of query, by the clock and of the processor."""
    names, (start, end) = queries.metric_names(), queries.extent()
    first = queries.search(limit=1).rows[0]
    word = first.preview.split()[0]
    middle = max(1, first.step // 2)
    asked: dict[str, Callable[[], object]] = {
        "metric_names": lambda: queries.metric_names("reward"),
        "last_values": queries.last_values,
        "series": lambda: queries.series(["reward/mean"]),
        "series of 12": lambda: queries.series(names[:12]),
        "events": queries.events,
        "spans of the run": lambda: queries.spans(start, end),
        "spans of a hundredth": lambda: queries.spans(end - (end - start) / 100, end),
        "evaluations": queries.evaluations,
        "group": lambda: queries.group(first.ticket),
        "provenance": lambda: queries.provenance(first.ticket),
    }
    filters = {
        "all": TrajectoryFilter(),
        "word": TrajectoryFilter(text=word),
        "rare word": TrajectoryFilter(text=f"needle{first.ticket}"),
        "begin of words": TrajectoryFilter(text=word[:2]),
        "steps": TrajectoryFilter(min_step=middle, max_step=middle + 100),
        "reward": TrajectoryFilter(min_reward=0.9, max_reward=1.05),
        "versions": TrajectoryFilter(min_version=middle, max_version=middle + 3),
        "success": TrajectoryFilter(success=False),
        "domain": TrajectoryFilter(domain="lake"),
        "server": TrajectoryFilter(server="rollout-3"),
        "everything": TrajectoryFilter(
            text=word, min_step=1, success=True, domain="lake", min_reward=0.5
        ),
    }
    for name, wanted in filters.items():
        for order in get_args(Order):
            asked[f"search {name}, {order}"] = lambda w=wanted, o=order: queries.search(
                w, o, count=True
            )  # type: ignore[misc]
    return {name: _milliseconds(query) for name, query in asked.items()}


def _milliseconds(query: Callable[[], object]) -> tuple[float, float]:
    taken = []
    busy = []
    for _ in range(REPEATS):
        at = time.perf_counter()
        cpu = time.process_time()
        query()
        taken.append(1e3 * (time.perf_counter() - at))
        busy.append(1e3 * (time.process_time() - cpu))
    return round(statistics.median(taken), 2), round(statistics.median(busy), 2)


if __name__ == "__main__":
    main()
