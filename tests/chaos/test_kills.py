"""kill -9 of every role while a run trains: nothing lost, nothing trained twice, by the audit, by a
tap, and by the harness's own books.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest
from chaos_world import BROKER_KILLS, KILLS, LIMIT_S, SEED, World, world
from windows import WINDOWS, Windows, windows

from bench.support.fleet import RunProcess

ROLES = ("learner", "rollout", "envhub", "rewardhub", "broker")


class Striker:
    """Hits one process after the other, and notes how long each recovery took and which windows
    were hit.
    """

    def __init__(self, world: World, look: Windows, rng: random.Random) -> None:
        self._world, self._look, self._rng = world, look, rng
        self.recoveries: defaultdict[str, list[float]] = defaultdict(list)
        self.hits: Counter[str] = Counter()
        self._of_role: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def hit(self, role: str, window: str) -> None:
        """See ``_hit``; one of a role at a time, others of it may be starting."""
        async with self._of_role[role]:
            await self._hit(role, window)

    async def _hit(self, role: str, window: str) -> None:
        """Kill one of a role in a window, and wait until all that was in flight has its record.

        That is later than that survivors hold the victim's work. For the learner: until it has
        completed a step that it had not before.
        """
        watch = self._world.watch
        killed_at: list[float] = []
        victim = None
        if role != "broker":
            await watch.until(
                lambda: any(child.running or child.done for child in self._world.fleet.of(role)),
                LIMIT_S,
            )
            if watch.step() >= self._world.steps:
                return  # the run was over before its turn came
            victim = self._rng.choice(
                [child for child in self._world.fleet.of(role) if child.running]
            )
        hit = await self._look.strike(
            window, victim.name if victim else role, self._killer(victim, killed_at)
        )
        self.hits[f"{role}:{hit}"] += 1
        if victim is None:
            await self._world.fleet.revive_broker()
        if role == "learner":
            before = watch.step()
            await watch.until(lambda: watch.step() > before or before == self._world.steps, LIMIT_S)
        else:
            pending = await watch.in_flight()
            await watch.until(lambda: pending <= watch.first.keys(), LIMIT_S)
        self.recoveries[role].append(time.monotonic() - killed_at[0])

    def _killer(self, victim: RunProcess | None, killed_at: list[float]) -> Callable[[], None]:
        def act() -> None:
            killed_at.append(time.monotonic())
            if victim is None:
                self._world.fleet.kill_broker()
            else:
                victim.kill()

        return act

    def report(self) -> str:
        took = {
            role: [round(s, 2) for s in sorted(times)] for role, times in self.recoveries.items()
        }
        return json.dumps(
            took
            | {
                "windows": dict(sorted(self.hits.items())),
                "repeated": self._world.watch.repeated,
                "closed": self._world.watch.reasons,
            }
        )


@pytest.mark.timeout(720 if KILLS <= 5 else 120 * KILLS)
async def test_each_role_is_killed_again_and_again(tmp_path: Path) -> None:
    rng = random.Random(SEED)
    order = [(role, number) for number in range(KILLS) for role in rng.sample(ROLES, len(ROLES))]
    pending: list[asyncio.Task[None]] = []
    steps = 2 * len(order) + (10 if KILLS <= 5 else 60)
    async with world(tmp_path, "kills", steps) as w, windows(w.fleet.url, "kills", w.watch) as look:
        striker = Striker(w, look, rng)
        await w.reach(2)
        for done, (role, number) in enumerate(order):
            await w.reach(2 * done + 3)
            await asyncio.sleep(rng.random() * 0.5)
            striking = asyncio.create_task(
                striker.hit(role, WINDOWS[role][(number + SEED) % len(WINDOWS[role])])
            )
            pending.append(striking)
            if role == "broker":  # without it nobody could say what is in flight
                await striking
        await asyncio.gather(*pending)
        await w.finish()
    assert sum(map(len, striker.recoveries.values())) >= len(order) - 2
    print(striker.report())


@pytest.mark.skipif(
    not BROKER_KILLS, reason="set RL_CHAOS_BROKER_KILLS; the test above kills the broker, too"
)
@pytest.mark.timeout(120 + 30 * BROKER_KILLS)
async def test_the_broker_is_killed_again_and_again_under_load(tmp_path: Path) -> None:
    rng = random.Random(SEED)
    async with (
        world(tmp_path, "broker", 3 * BROKER_KILLS + 10, 0.02) as w,
        windows(w.fleet.url, "broker", w.watch) as look,
    ):
        striker = Striker(w, look, rng)
        for number in range(BROKER_KILLS):
            await w.reach(3 * number + 2)
            await asyncio.sleep(rng.random() * 0.5)
            await striker.hit("broker", WINDOWS["broker"][number % len(WINDOWS["broker"])])
        await w.finish()
    print(striker.report())
