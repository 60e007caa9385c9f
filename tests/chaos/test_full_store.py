"""The broker's store is full in the middle of a step: nothing is lost, the learner comes back, and
trimming carries the run to its end.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import chaos_run as chaos
import pytest
from chaos_world import LIMIT_S, World, world
from store_filler import LIMIT_MIB, Filler

from bench.support.fleet import RunFleet
from broker.contract import wire
from broker.contract.streams import RESERVE, RUNS, SAMPLES
from broker.jetstream import reserve
from broker.server.private_server import BrokerServer
from learner.checkpoints import checkpoint

STEPS = 40
SAID = "cannot store"
MAX_TOKENS = 512
ROOM_MIB = 12  # 8 of it are the reserve; a step's groups take 0.15


class SmallFleet(RunFleet):
    """Its broker may store little."""

    def start_broker(self) -> None:
        self._server = BrokerServer(
            str(self.folder / "broker"), port=self.port, store_max_gib=LIMIT_MIB / 1024
        )
        self._server.start()


async def epoch(w: World) -> int:
    found = await w.bus.key_value(RUNS).get(w.bus.run)
    return found[0].epoch if found is not None and isinstance(found[0], wire.RunSpec) else 0


async def refused(w: World) -> bool:
    """Whether nothing at all can be stored, and a hub has noticed."""
    said = any(
        SAID in child.log.read_text()
        for role in ("envhub", "rewardhub")
        for child in w.fleet.of(role)
    )
    return said and not await reserve.has_room(w.bus.link, w.bus.run)


async def until(w: World, holds: Any) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not await holds():  # noqa: ASYNC110  the broker tells nobody
            await asyncio.sleep(0.1)


@pytest.mark.timeout(480)
async def test_the_store_is_full_in_the_middle_of_a_step(tmp_path: Path) -> None:
    plugin = chaos.ROOT / "bench" / "support" / "simulated.py"
    longer: dict[str, Any] = {
        "max_context_tokens": 640,
        "sampling": {"max_tokens": MAX_TOKENS},
        "group_size": 8,
    }
    values = chaos.config(tmp_path, "full", steps=STEPS, pace_s=0.02)["domains"]
    sections: dict[str, Any] = {
        "train": {"micro_batch_tokens": 8192},
        "rollout": {"engine": f"{plugin}:InstantEngine", "max_context_tokens": 640},
        # only a store that fills up asks for one
        "checkpoint": {"every_steps": 0, "every_minutes": 0},
        "broker": {"store_max_gib": LIMIT_MIB / 1024},
        "domains": {"sums": values["sums"] | longer},
    }
    async with world(tmp_path, "full", STEPS, 0.02, make_fleet=SmallFleet, **sections) as w:
        filler = Filler(w.bus)
        await filler.leave(ROOM_MIB)
        await w.reach(3)
        await filler.fill()
        await until(w, lambda: refused(w))
        (learner,) = w.fleet.of("learner")
        reached = w.watch.step()
        learner.kill()
        await until(w, lambda: took_over(w))
        await filler.fill()  # what the reserve gave back, too
        await until(w, lambda: refused(w))
        # without a checkpoint it makes the steps again whose records the log holds
        await w.reach(reached)
        assert await stands_still(w) < STEPS
        await filler.free()
        await filler.leave(ROOM_MIB)
        await w.finish()
        # trimmed behind what had filled it
        assert await w.bus.first_seq(SAMPLES) > reached * chaos.GROUPS
        times = {child.name: child.log.read_text().count(SAID) for child in w.fleet.children}
        # filled twice, and a short respite by the reserve
        assert {name: count for name, count in times.items() if count > 4} == {}
        assert len(checkpoint.list_checkpoints(w.watch.folder / "checkpoints")) == 2
        assert (
            int((await w.bus.info(RESERVE))["state"]["bytes"])
            >= reserve.PIECES * reserve.PIECE_BYTES
        )


async def stands_still(w: World) -> int:
    """The step at which training waits; the log may hold records of more steps than the first
    learner had made.
    """
    before = -1
    while (now := w.watch.step()) != before:
        before = now
        await asyncio.sleep(3.0)
    return now


async def took_over(w: World) -> bool:
    return await epoch(w) == 2
