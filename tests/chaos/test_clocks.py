"""The calendar clock of every Python process set forward and back while a run trains: nobody
decides anything by it.

Not by libfaketime (0.9.10): told to leave the monotonic clock alone it still rewrites waits that
end by it, so that every ``time.sleep`` of Python 3.11 fails with EINVAL, at an offset of 0, too.
``shifted_clock.c`` touches the calendar clock only.

The broker is a static Go program and keeps the true time, as a broker on another machine would.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import subprocess
import sys
import time
from collections import defaultdict
from contextlib import aclosing
from pathlib import Path
from typing import Any

import psutil
import pytest
from chaos_world import LIMIT_S, World, world
from shifted_clock import NoLibraryError, ShiftedClock

from broker.jetstream.core_messages import watch_metrics

HOUR_S = 3600
STEPS, MOVES, PACE_S, CHECKPOINT_S = 60, (20, 32, 44), 0.3, 3.0
LAKE = {
    "env": "frozenlake",
    "env_args": {"observe": "cell"},
    "isolation": "process",  # environments in processes, too
    "group_size": 2,
    "max_turns": 3,
    "max_context_tokens": 64,
    "deadline_s": 90,
    "sampling": {"max_tokens": 4},
}
PROBE = """
import datetime, threading, time
for _ in range(3):
    input()
    began = time.monotonic()
    time.sleep(0.01)
    assert not threading.Event().wait(0.01)
    assert time.monotonic() - began < 60
    print(time.time(), datetime.datetime.now().timestamp(), time.monotonic(), flush=True)
"""


@pytest.fixture
def clock(tmp_path: Path) -> ShiftedClock:
    try:
        return ShiftedClock(tmp_path)
    except NoLibraryError as error:
        pytest.skip(str(error))


def test_the_calendar_clock_moves_and_the_monotonic_one_does_not(clock: ShiftedClock) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROBE],
        env=os.environ | clock.environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as probe:
        assert probe.stdin is not None
        assert probe.stdout is not None
        for offset_s in (0, HOUR_S, -HOUR_S):
            clock.set(offset_s)
            probe.stdin.write("\n")
            probe.stdin.flush()
            calendar, date, monotonic = map(float, probe.stdout.readline().split())
            assert abs(calendar - time.time() - offset_s) < 60
            assert abs(date - time.time() - offset_s) < 60
            assert abs(monotonic - time.monotonic()) < 60
    assert probe.returncode == 0


class Seen:
    """By process, the offsets from the true time, in hours, that its messages have carried."""

    def __init__(self, w: World) -> None:
        self.hours: dict[str, set[int]] = defaultdict(set)
        self._world = w

    async def serve(self) -> None:
        async with aclosing(watch_metrics(self._world.bus)) as messages:
            async for metrics in messages:
                self.hours[metrics.id].add(round((metrics.time - time.time()) / HOUR_S))

    async def by_all(self, hours: int) -> None:
        """Until each process has told a time with this offset."""
        await self._world.watch.until(lambda: self._all(hours), LIMIT_S)

    def _all(self, hours: int) -> bool:
        seen = [name for name, found in self.hours.items() if hours in found]
        return len(seen) >= len(self._world.fleet.children)


def processes(w: World) -> dict[int, set[int]]:
    """By process of a role, those that it and its workers have started."""
    return {
        child.pid: {kid.pid for kid in psutil.Process(child.pid).children(recursive=True)}
        for child in w.fleet.children
    }


def checkpoints(w: World) -> list[int]:
    return sorted(
        int(path.name.removeprefix("step-"))
        for path in (w.watch.folder / "checkpoints").glob("step-*")
    )


def check_checkpoints(steps: list[int], lines: list[dict[str, Any]], moves: list[int]) -> None:
    """Some between any two moves of the clock, and none sooner than is set; the last one is that of
    the run's end.
    """
    for after, until in itertools.pairwise([0, *moves, len(lines)]):
        assert [step for step in steps if after < step <= until], (
            f"no checkpoint in steps {after + 1} to {until}, but {steps}"
        )
    for one, other in itertools.pairwise([step for step in steps if 0 < step < len(lines)]):
        assert sum(line["time/step"] for line in lines[one:other]) > 0.9 * CHECKPOINT_S, (
            f"checkpoints {one} and {other}"
        )


@pytest.mark.skipif(
    not os.environ.get("RL_CHAOS_CLOCKS"),
    reason="a minute or more; with make chaos (RL_CHAOS_CLOCKS=1)",
)
@pytest.mark.timeout(600)
async def test_clocks_are_set_forward_and_back(
    tmp_path: Path, clock: ShiftedClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in clock.environment.items():
        monkeypatch.setenv(name, value)
    moves: list[int] = []
    section = {"every_steps": 0, "every_minutes": CHECKPOINT_S / 60, "keep": 1000}
    async with world(
        tmp_path, "clocks", steps=STEPS, pace_s=PACE_S, domains={"lake": LAKE}, checkpoint=section
    ) as w:
        seen = Seen(w)
        listening = asyncio.create_task(seen.serve())
        await w.reach(MOVES[0] // 2)
        await seen.by_all(0)
        started = processes(w)
        for role in ("envhub", "rewardhub"):
            assert all(started[hub.pid] for hub in w.fleet.of(role))  # their workers
        assert all(clock.in_process(pid) for pid in itertools.chain(started, *started.values()))
        for step, hours in zip(MOVES, (1, -1, 0), strict=True):
            await w.reach(step)
            seen.hours.clear()
            clock.set(hours * HOUR_S)
            moves.append(w.watch.step())
            await seen.by_all(hours)
            await w.reach(moves[-1] + 3)
        assert w.watch.step() < w.steps
        now = processes(w)
        assert now.keys() == started.keys()
        # no worker fell over either
        assert {pid: gone for pid in now if (gone := started[pid] - now[pid])} == {}
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)
        await w.finish()
        lines = w.watch.lines()
        assert set(started) == {child.pid for child in w.fleet.children}
    jumps = [
        round((after["time"] - before["time"]) / HOUR_S)
        for before, after in itertools.pairwise(lines)
    ]
    assert [jump for jump in jumps if jump] == [1, -2, 1]
    assert {
        name: line[name]
        for line in lines
        for name in line
        if name.startswith("time/") and not 0 <= line[name] < LIMIT_S
    } == {}
    print(f"checkpoints at {checkpoints(w)}, clocks moved after steps {moves}")
    check_checkpoints(checkpoints(w), lines, moves)
