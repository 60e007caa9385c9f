"""A learner a hundred times slower than the hubs: they wait, nothing is dropped, queues hold what
credit permits, memory stays level.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

import chaos_run as chaos
import psutil
import pytest
from chaos_world import LIMIT_S, World, world

from broker.contract.streams import EPISODES, SAMPLES, TICKETS

STEP_S = float(os.environ.get("RL_CHAOS_SLOW_STEP_S", "1.5"))
STEPS = int(os.environ.get("RL_CHAOS_SLOW_STEPS", "9"))
WARM_UP = 4  # steps
MAX_TOKENS = 512
MIB = 2**20
MAY_GROW_MIB = 24.0  # what a queue without bounds would hold within seconds
CREDIT = chaos.GROUPS * (1 + chaos.MAX_STALENESS)


class Gauge:
    """Twice a step: the resident memory of every process with its workers, and what the queues
    hold.
    """

    def __init__(self, w: World) -> None:
        self._world = w
        self.resident: defaultdict[str, list[float]] = defaultdict(list)  # MiB, by process
        self.deepest: dict[str, int] = {}

    async def serve(self) -> None:
        while True:
            pids = {child.name: child.pid for child in self._world.fleet.children} | {
                "nats-server": self._world.fleet.broker_pid
            }
            for name, pid in pids.items():
                self.resident[name].append(await asyncio.to_thread(resident_mib, pid))
            for stream in (TICKETS, EPISODES, SAMPLES):
                held = sum((await self._world.bus.depth(stream)).values())
                self.deepest[stream.name] = max(self.deepest.get(stream.name, 0), held)
            await asyncio.sleep(STEP_S / 2)

    def levels(self) -> dict[str, tuple[float, float]]:
        """MiB of every process, the median of the first and of the last third."""
        third = {name: max(1, len(values) // 3) for name, values in self.resident.items()}
        return {
            name: (
                statistics.median(values[: third[name]]),
                statistics.median(values[-third[name] :]),
            )
            for name, values in self.resident.items()
        }


def resident_mib(pid: int) -> float:
    process = psutil.Process(pid)
    return (
        float(sum(one.memory_info().rss for one in [process, *process.children(recursive=True)]))
        / MIB
    )


def times_slower(tap: Path) -> float:
    """A step of the learner, against the time from its tickets to their last record; medians, both
    as the tap saw them.
    """
    issued: dict[int, float] = {}
    scored: dict[int, float] = {}
    for row in map(json.loads, tap.read_text().splitlines()):
        if row["event"] in ("ticket", "sample"):
            (issued if row["event"] == "ticket" else scored).setdefault(row["ticket"], row["time"])
    bursts = [
        list(range(first, first + chaos.GROUPS))
        for first in range(CREDIT + 1, max(scored), chaos.GROUPS)
    ]
    whole = [numbers for numbers in bursts if all(number in scored for number in numbers)]
    took = [
        max(scored[n] for n in numbers) - min(issued[n] for n in numbers)
        for numbers in whole[WARM_UP:]
    ]
    begun = [min(issued[n] for n in numbers) for numbers in whole[WARM_UP:]]
    return statistics.median([b - a for a, b in itertools.pairwise(begun)]) / statistics.median(
        took
    )


@pytest.mark.timeout(480 + 3 * STEPS * STEP_S)
async def test_a_learner_a_hundred_times_slower_than_the_hubs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RL_SIMULATED_STEP_S", str(STEP_S))
    plugin = chaos.ROOT / "bench" / "support" / "simulated.py"
    longer: dict[str, Any] = {
        "max_context_tokens": 640,
        "sampling": {"max_tokens": MAX_TOKENS},
        "group_size": 8,
    }
    values = chaos.config(tmp_path, "slow", steps=STEPS, pace_s=0.0)["domains"]
    sections: dict[str, Any] = {
        "train": {"backend": f"{plugin}:SlowBackend", "micro_batch_tokens": 8192},
        "rollout": {"engine": f"{plugin}:InstantEngine", "max_context_tokens": 640},
        "checkpoint": {"every_steps": 1},
        "domains": {"sums": values["sums"] | longer},
    }
    async with world(tmp_path, "slow", STEPS, 0.0, **sections) as w:
        await w.reach(WARM_UP, LIMIT_S + WARM_UP * 3 * STEP_S)
        gauge = Gauge(w)
        measuring = asyncio.create_task(gauge.serve())
        await w.reach(STEPS - 1, LIMIT_S + 3 * STEPS * STEP_S)
        measuring.cancel()
        await asyncio.gather(measuring, return_exceptions=True)
        await w.finish()
    lines = w.watch.lines()
    levels = {
        name: (round(first, 1), round(last, 1))
        for name, (first, last) in sorted(gauge.levels().items())
    }
    slower = times_slower(w.tap)
    print(
        json.dumps(
            {
                "times_slower": round(slower),
                "mib": levels,
                "deepest": gauge.deepest,
                "seconds": len(gauge.resident["learner"]),
            }
        )
    )
    assert {
        name: levels[name] for name, (first, last) in levels.items() if last - first > MAY_GROW_MIB
    } == {}
    assert gauge.deepest["tickets"] <= CREDIT
    assert gauge.deepest["episodes"] <= CREDIT
    # between the oldest of two checkpoints and the end
    assert gauge.deepest["samples"] <= 4 * chaos.GROUPS + CREDIT
    assert [(line["ticket/dropped"], line["ticket/dead"]) for line in lines] == [(0, 0)] * STEPS
    assert slower >= 100 or STEP_S < 5, "a step takes no hundred times as long as its groups"
