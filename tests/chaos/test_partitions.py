"""Each kind of process cut from the broker without a word, a hub cut from a server, and one broker
of three cut from its peers.

Real packets through real namespaces; what is cut vanishes, nothing is reset, so only silence tells.
"""

from __future__ import annotations

import asyncio
import functools
import os
import time
from pathlib import Path

import pytest
from chaos_world import KEEP_ALL, LIMIT_S, World, world
from network_namespaces import network, why_not
from partitioned_fleet import PartitionedFleet

from broker.contract import wire
from broker.contract.streams import MEMBERS

# Seconds of each partition. `make chaos` has 1, 30 and 180; nothing in the system remembers a
# message id for longer than 120 s.
PARTITION_S = [float(number) for number in os.environ.get("RL_CHAOS_PARTITION_S", "1").split(",")]
VICTIMS = ("envhub-0", "rewardhub-0", "rollout-0", "learner", "hub from server")
CHOSEN = os.environ.get("RL_CHAOS_PARTITION_VICTIMS", ",".join(VICTIMS)).split(",")

pytestmark = [
    pytest.mark.skipif(
        "RL_CHAOS_PARTITION_S" not in os.environ,
        reason="minutes; with make chaos (RL_CHAOS_PARTITION_S=1,30,180)",
    ),
    pytest.mark.skipif(bool(why := why_not()), reason=why),
    # nats-py's sockets of attempts that nobody answered
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


async def server_port(w: World, name: str) -> int:
    """Where a rollout server takes requests."""
    found = await w.bus.key_value(MEMBERS).get(f"{w.bus.run}.rollout.{name}")
    assert found is not None
    assert isinstance(found[0], wire.Presence)
    return int(found[0].address.rpartition(":")[2])


async def trains_on(w: World) -> float:
    """Seconds until two more steps are done."""
    before = w.watch.step()
    return await w.watch.until(lambda: w.watch.step() >= before + 2, LIMIT_S)


@pytest.mark.parametrize("seconds", PARTITION_S)
@pytest.mark.timeout(400 + 20 * max(PARTITION_S))
async def test_each_role_is_cut_from_the_broker(tmp_path: Path, seconds: float) -> None:
    with network(1) as net:
        make = functools.partial(PartitionedFleet, network=net)
        async with world(
            tmp_path,
            "cut",
            steps=20 * len(CHOSEN) + 4,
            pace_s=max(seconds / 25, 0.05),
            make_fleet=make,
        ) as w:
            fleet = w.fleet
            assert isinstance(fleet, PartitionedFleet)
            took = {}
            await w.reach(2)
            for victim in CHOSEN:
                pending = await w.watch.in_flight()
                if victim == "hub from server":
                    net.cut_port(await server_port(w, "rollout-1"))
                else:
                    fleet.cut(victim)
                began = time.monotonic()
                await asyncio.sleep(seconds)
                net.heal()
                await w.watch.until(
                    lambda pending=pending: pending <= w.watch.first.keys(), LIMIT_S
                )  # type: ignore[misc]
                await trains_on(w)
                took[victim] = round(time.monotonic() - began - seconds, 1)
            print(
                f"cut for {seconds:g} s each; after that, all that was in flight had come and two steps were done "
                f"within",
                took,
            )
            await w.reach(w.steps, LIMIT_S + 6 * len(CHOSEN) * seconds)
            await w.finish()


@pytest.mark.timeout(400)
async def test_one_broker_of_three_is_cut_from_the_others(tmp_path: Path) -> None:
    """Its clients still reach it, but it can store nothing: they must find that out and go
    elsewhere.
    """
    seconds = max(PARTITION_S) if max(PARTITION_S) < 30 else 30.0
    if seconds < 30:
        pytest.skip("with make chaos: clients wait some seconds before they doubt a broker")
    with network(3) as net:
        make = functools.partial(PartitionedFleet, network=net)
        async with world(
            tmp_path, "split", steps=80, pace_s=1.0, make_fleet=make, checkpoint=KEEP_ALL
        ) as w:
            fleet = w.fleet
            assert isinstance(fleet, PartitionedFleet)
            took = []
            await w.reach(2)
            for node in range(3):
                pending = await w.watch.in_flight()
                net.isolate(node, [other for other in range(3) if other != node])
                w.note_blind()
                began = time.monotonic()
                await asyncio.sleep(seconds)
                net.heal()
                await w.watch.until(
                    lambda pending=pending: pending <= w.watch.first.keys(), LIMIT_S
                )  # type: ignore[misc]
                await trains_on(w)
                took.append(round(time.monotonic() - began - seconds, 1))
                await fleet.settled(w.bus)
            print(f"each of three brokers cut from the others for {seconds:g} s; back after", took)
            await w.finish()
