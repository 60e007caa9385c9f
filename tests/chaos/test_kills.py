"""kill -9 of every role while a run trains: nothing lost, nothing trained twice, by the audit, by a tap, and by the harness's own books."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
from collections import defaultdict
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from chaos_world import KILLS, LIMIT_S, SEED, World, world

from bench.fleet import Child
from bench.watch import Watch

ROLES = ("learner", "rollout", "envhub", "rewardhub", "broker")
WINDOWS = ("anywhere", "line", "checkpoint", "trim")  # where the learner is hit


async def at_window(watch: Watch, window: str) -> None:
    """Return where a step, its line, its checkpoint and its trim lie close together."""
    checkpoints, metrics = watch.folder / "checkpoints", watch.folder / "metrics.jsonl"
    names, size = set(os.listdir(checkpoints)), metrics.stat().st_size
    conditions: dict[str, Callable[[], bool]] = {
        "anywhere": lambda: True,
        "line": lambda: metrics.stat().st_size != size,
        "checkpoint": lambda: any(not name.startswith("step-") for name in set(os.listdir(checkpoints)) - names),
        "trim": lambda: any(name.startswith("step-") for name in set(os.listdir(checkpoints)) - names),
    }
    with contextlib.suppress(TimeoutError):
        await watch.until(conditions[window], 20, every_s=0.0005)


def strike(world: World, role: str, victim: Child | None) -> Callable[[], Awaitable[None]]:
    async def act() -> None:
        if victim is None:
            await world.fleet.restart_broker()
        elif victim.running:
            victim.kill()

    return act


@pytest.mark.timeout(300 if KILLS <= 5 else 90 * KILLS)
async def test_each_role_is_killed_again_and_again(tmp_path: Path) -> None:
    rng = random.Random(SEED)
    order = [(role, number) for number in range(KILLS) for role in rng.sample(ROLES, len(ROLES))]
    recoveries: defaultdict[str, list[float]] = defaultdict(list)
    pending: list[asyncio.Task[None]] = []
    async with world(tmp_path, "kills", steps=2 * len(order) + 10) as w:

        async def hit(role: str, number: int) -> None:
            victim = rng.choice(w.fleet.of(role)) if role != "broker" else None
            recoveries[role].append(await w.watch.recovery_s(role, strike(w, role, victim), LIMIT_S))

        await w.reach(2)
        for done, (role, number) in enumerate(order):
            await w.reach(2 * done + 3)
            await asyncio.sleep(rng.random() * 0.5)
            if role == "learner":
                await at_window(w.watch, WINDOWS[number % len(WINDOWS)])
            if role == "broker":
                await hit(role, number)
            else:
                pending.append(asyncio.create_task(hit(role, number)))
        await asyncio.gather(*pending)
        await w.finish()
    assert {role: len(times) for role, times in recoveries.items()} == dict.fromkeys(ROLES, KILLS)
    print(json.dumps({role: [round(s, 2) for s in sorted(times)] for role, times in recoveries.items()} | {"repeated": w.watch.repeated}))
