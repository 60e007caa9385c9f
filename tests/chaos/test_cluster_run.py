"""A whole run on three brokers, each of them killed again and again: nothing lost, nothing trained
twice, and how long a recovery takes.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from pathlib import Path

import pytest
from broker_cluster import NODES, ClusterFleet
from chaos_world import KEEP_ALL, LIMIT_S, SEED, world

ROUNDS = int(os.environ.get("RL_CHAOS_CLUSTER", "0"))  # kills of each broker; `make chaos` has 5
DOWN_S = 3.0  # longer than an election may take, so that the other two must do without it


@pytest.mark.skipif(ROUNDS == 0, reason="minutes; with make chaos (RL_CHAOS_CLUSTER=5)")
# nats-py's sockets of attempts at a dead broker
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.timeout(200 + 150 * ROUNDS)
async def test_each_of_three_brokers_is_killed_in_a_run(tmp_path: Path) -> None:
    rng = random.Random(SEED)
    took: list[float] = []
    steps = 6 * NODES * ROUNDS + 4
    async with world(
        tmp_path, "cluster", steps=steps, pace_s=0.3, make_fleet=ClusterFleet, checkpoint=KEEP_ALL
    ) as w:
        fleet = w.fleet
        assert isinstance(fleet, ClusterFleet)
        await w.reach(2)
        for node in [node for _ in range(ROUNDS) for node in rng.sample(range(NODES), NODES)]:
            restarting: list[asyncio.Task[None]] = []

            async def strike(
                node: int = node, restarting: list[asyncio.Task[None]] = restarting
            ) -> None:
                restarting.append(asyncio.create_task(fleet.nodes.restart(node, DOWN_S)))
                await asyncio.sleep(0)

            took.append(await w.watch.recovery_s("broker", strike, LIMIT_S))
            await asyncio.gather(*restarting)
            before = w.watch.step()
            await w.reach(before + 2)
            await fleet.nodes.settled(w.bus)
        await w.finish()
    print(
        json.dumps(
            {
                "recoveries_s": [round(s, 1) for s in sorted(took)],
                "kills": len(took),
                "repeated": w.watch.repeated,
            }
        )
    )
