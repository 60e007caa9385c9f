"""A run on a machine whose processors others use: nothing is lost, and no ticket dies."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from burners import burners
from chaos_world import world

BURNERS = int(os.environ.get("RL_CHAOS_BURNERS", "4"))  # `make chaos` has 20
STEPS = int(os.environ.get("RL_CHAOS_BURNT_STEPS", "6"))  # and 30


@pytest.mark.timeout(300 + 20 * BURNERS * STEPS)
async def test_busy_loops_cost_only_time(tmp_path: Path) -> None:
    with burners(BURNERS):
        async with world(tmp_path, "loaded", STEPS, pace_s=0.0) as w:
            await w.finish()
            last = w.watch.lines()[-1]
    assert (last["ticket/dead"], last["ticket/trained"]) == (0, STEPS * 4)
