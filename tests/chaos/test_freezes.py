"""SIGSTOP and SIGCONT of every role; processes that leave and join, and a learner that wakes up
when another one has taken its place.
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import chaos_run as chaos
import pytest
from chaos_world import FREEZE_S, LIMIT_S, world


# nats-py leaves the sockets of its attempts to reach a frozen broker to the garbage collector
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.timeout(480 + 30 * FREEZE_S)
async def test_each_role_is_frozen_for_a_while(tmp_path: Path) -> None:
    # at most some 15 steps in a freeze
    async with world(tmp_path, "freezes", steps=80, pace_s=FREEZE_S / 30) as w:
        for count, role in enumerate(
            ("envhub", "rewardhub", "rollout", "broker", "learner"), start=1
        ):
            await w.reach(8 * count)
            pids = (
                [w.fleet.broker_pid]
                if role == "broker"
                else [child.pid for child in w.fleet.of(role)][:1]
            )
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(FREEZE_S)
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
            before = w.watch.step()
            await w.watch.until(lambda before=before: w.watch.step() > before, LIMIT_S)  # type: ignore[misc]
        await w.finish()


@pytest.mark.timeout(600)
async def test_others_leave_and_join_and_a_learner_that_wakes_up_behind_another_is_fenced(
    tmp_path: Path,
) -> None:
    """SIGTERM drains: hubs and servers hand back what they have not finished, and end with 0;
    others join at any time.
    """
    async with world(tmp_path, "elastic", steps=60) as w:
        await w.reach(6)
        leaving = [w.fleet.of(role)[0] for role in ("rollout", "envhub", "rewardhub")]
        for child in leaving:
            os.kill(child.pid, signal.SIGTERM)
        (zombie,) = w.fleet.of("learner")
        # so that the run is not over before the others are there, however slow the machine
        zombie.freeze()
        late = [
            w.fleet.add(child.role, f"{child.role}-late", *chaos.OPTIONS.get(child.role, ()))
            for child in leaving
        ]
        await w.fleet.wait_done(leaving)
        w.fleet.children.remove(zombie)
        w.fleet.add("learner", "second", "start", str(tmp_path / "run.yaml"), "--take-over")
        await w.watch.until(
            lambda: all("joined run elastic" in one.log.read_text() for one in late), LIMIT_S
        )
        await w.reach(24)
        zombie.thaw()
        assert zombie.process is not None
        code = await asyncio.to_thread(zombie.process.wait, LIMIT_S)
        assert code == 2, zombie.tail()
        assert "a newer learner took over under epoch 2, this one is epoch 1" in zombie.tail()
        assert "Traceback" not in zombie.log.read_text()
        await w.finish()
