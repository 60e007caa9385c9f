"""A hub that is frozen beyond the deadlines of its tickets, and reward hubs that are away longer
than every timeout: nothing is closed, because others play what the hub held, and groups that wait
for a score do not age.
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import chaos_run as chaos
import pytest
from chaos_world import FREEZE_S, LIMIT_S, world

from broker.contract.streams import ACK_WAIT_S, EPISODES

SLOW = '''"""An environment whose step takes longer than marks may be missing."""

import asyncio

from envhub.envs.base import Environment, Observation, StepResult


class Slow(Environment):
    isolation = "none"

    def reset(self, task_index, split, seed):
        return Observation("?", anchor="?")

    async def step(self, text):
        await asyncio.sleep({step_s})
        return StepResult(Observation(".", anchor="."), 1.0 if len(text) % 2 else 0.0, True, True, True)
'''
FROZEN_S = ACK_WAIT_S + 8  # others have its tickets by then, and are not done with them
STEP_S = FROZEN_S + 6
DEADLINE_S = STEP_S + 6  # passes in that time for what it had for 12 s before
TIMEOUT_S = 25.0  # of a ticket


@pytest.mark.timeout(600)
async def test_a_frozen_hub_closes_nothing_when_it_wakes(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW.format(step_s=STEP_S))
    slow: dict[str, Any] = {
        "env": f"{tmp_path / 'slow.py'}:Slow",
        "isolation": "none",
        "deadline_s": DEADLINE_S,
    }
    slow |= {
        "group_size": 2,
        "max_context_tokens": 64,
        "sampling": {"max_tokens": 4},
        "weight": 4.0,
    }
    async with world(tmp_path, "sleepers", steps=8, domains={"slow": slow}) as w:
        await w.reach(1)
        (first, _) = w.fleet.of("envhub")
        for _ in range(2):
            await asyncio.sleep(STEP_S * 0.75)
            os.kill(first.pid, signal.SIGSTOP)
            await asyncio.sleep(FROZEN_S)
            os.kill(first.pid, signal.SIGCONT)
            before = w.watch.step()
            await w.watch.until(lambda before=before: w.watch.step() > before, LIMIT_S)  # type: ignore[misc]
        await w.finish()
        assert w.watch.reasons == {}
        assert "abandoned" in first.log.read_text(), "it held nothing"


@pytest.mark.timeout(600)
async def test_reward_hubs_may_be_away_for_longer_than_every_timeout(tmp_path: Path) -> None:
    config = chaos.config(tmp_path, "unscored", steps=20)
    domains = {
        name: {**domain, "deadline_s": TIMEOUT_S - 5} for name, domain in config["domains"].items()
    }
    timing = {"ticket_timeout_s": TIMEOUT_S}
    async with world(tmp_path, "unscored", steps=20, train=timing, domains=domains) as w:
        await w.reach(3)
        hubs = w.fleet.of("rewardhub")
        for hub in hubs:
            os.kill(hub.pid, signal.SIGTERM)
        await w.fleet.wait_done(hubs)
        await asyncio.sleep(TIMEOUT_S + 2 * FREEZE_S)
        assert sum((await w.bus.depth(EPISODES)).values()), "no group waits for a score"
        late = w.fleet.add("rewardhub", "rewardhub-late")
        await w.reach(8)
        os.kill(late.pid, signal.SIGSTOP)
        await asyncio.sleep(TIMEOUT_S + FREEZE_S)
        os.kill(late.pid, signal.SIGCONT)
        await w.finish()
        assert w.watch.reasons == {}
