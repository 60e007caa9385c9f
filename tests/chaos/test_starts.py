"""kill -9 of every process in its first seconds, and two learners of one run at once: the run comes
up and its books agree.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import Counter
from pathlib import Path

import chaos_run as chaos
import pytest
from chaos_world import LIMIT_S, SEED, World, world

from bench.support.fleet import FENCED, RunProcess

# of each process; `make chaos` has 10
EARLY_KILLS = int(os.environ.get("RL_CHAOS_EARLY_KILLS", "1"))
EARLY_S = 10.0  # after its start, within which a process is killed
LINES = 4  # a learner has written as many when it trains
WITHIN_S = 30.0  # longest wait for such a line
SLOW_S, QUICK_S = 3.0, 0.1  # a reward, while learners start and while they train
# rounds of two learners; `make chaos` has 10
RIVALRIES = int(os.environ.get("RL_CHAOS_RIVALRIES", "1"))


async def kill_early(w: World, child: RunProcess, rng: random.Random, ages: list[float]) -> None:
    """Kill one process at a random moment, each of its first lives; notes its ages in seconds.

    In every other life it is just behind one of its first lines in the log: on a busy machine its
    imports alone take EARLY_S.
    """
    for number in range(EARLY_KILLS):
        await w.watch.until(lambda: child.running or child.done, LIMIT_S)
        if number % 2 == 0:
            line, until = rng.randint(1, LINES), time.monotonic() + WITHIN_S
            await w.watch.until(
                lambda line=line, until=until: child.num_lines >= line or time.monotonic() > until,
                LIMIT_S,
            )
            await asyncio.sleep(rng.random())
        else:
            await asyncio.sleep(max(0.0, child.started + rng.random() * EARLY_S - time.monotonic()))
        if not child.running:
            return  # the run was over before its turn came
        ages.append(time.monotonic() - child.started)
        child.kill()
        await asyncio.to_thread(child.process.wait)  # type: ignore[union-attr]


async def kill_the_broker_early(w: World, rng: random.Random, ages: list[float]) -> None:
    """The same for the broker, whose first life begins before all others."""
    for _ in range(EARLY_KILLS):
        age = rng.random() * EARLY_S
        await asyncio.sleep(age)
        ages.append(age)
        await w.fleet.restart_broker()


@pytest.mark.timeout(300 + 60 * EARLY_KILLS)
async def test_every_process_is_killed_in_its_first_seconds(tmp_path: Path) -> None:
    """All at once, while the run starts: of each process only the last life gets beyond its first
    seconds.
    """
    rng, steps = random.Random(SEED), 6 + 10 * EARLY_KILLS
    ages: dict[str, list[float]] = {}
    async with world(tmp_path, "starts", steps) as w:
        kills = [
            kill_early(w, child, random.Random(rng.random()), ages.setdefault(child.name, []))
            for child in w.fleet.children
        ]
        await asyncio.gather(*kills, kill_the_broker_early(w, rng, ages.setdefault("broker", [])))
        await w.finish()
    print({name: [round(age, 1) for age in found] for name, found in ages.items()})
    for name in ("broker", "learner"):  # others may find the run over before their last turn
        assert len(ages[name]) == EARLY_KILLS, name


class Rivals:
    """Two learners of one run."""

    def __init__(self, w: World, learners: tuple[RunProcess, RunProcess]) -> None:
        self._w, self.both = w, learners
        self.won: Counter[str] = Counter()

    async def settled(self) -> RunProcess:
        """Wait until one of them has been fenced and the other one has made a step that was not
        there before; the other one.

        Until then rewards are slow, so that the run is not over before a learner has started,
        however slow the machine.
        """
        chaos.set_pace(self._w.folder, SLOW_S)
        await self._w.watch.until(lambda: sum(child.has_ended for child in self.both) == 1, LIMIT_S)
        chaos.set_pace(self._w.folder, QUICK_S)
        (winner,) = (child for child in self.both if not child.has_ended)
        before = self._w.watch.step()
        await self._w.watch.until(lambda: self._w.watch.step() > before, LIMIT_S)
        assert winner.running
        self.won[winner.name] += 1
        return winner

    def other(self, one: RunProcess) -> RunProcess:
        return next(child for child in self.both if child is not one)


@pytest.mark.timeout(300 + 120 * RIVALRIES)
async def test_of_two_learners_of_one_run_exactly_one_trains(tmp_path: Path) -> None:
    """One joins the other, the winner is killed and both start together, one of them is killed
    while they do.
    """
    rng = random.Random(SEED)
    async with world(tmp_path, "rivals", 15 + 20 * RIVALRIES, QUICK_S) as w:
        (first,) = w.fleet.of("learner")
        await w.reach(2)
        second = w.fleet.add(
            "learner", "second", "start", str(tmp_path / "run.yaml"), "--take-over"
        )
        first.command.append("--take-over")  # in its next lives
        first.may_end_with = second.may_end_with = FENCED
        rivals = Rivals(w, (first, second))
        assert await rivals.settled() is second  # who comes later takes over
        for number in range(RIVALRIES):
            winner = await rivals.settled() if number else second
            winner.kill()  # and is started again by the fleet
            rivals.other(winner).start()
            if number:  # both are starting: one of them once more, at any moment
                victim = rng.choice(rivals.both)
                await w.watch.until(lambda victim=victim: victim.running, LIMIT_S)  # type: ignore[misc]
                await asyncio.sleep(rng.random() * EARLY_S)
                if victim.running:
                    victim.kill()
            winner = await rivals.settled()
            if number + 1 < RIVALRIES:
                rivals.other(winner).start()
        await w.finish()
    print(dict(rivals.won))
