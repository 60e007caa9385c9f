"""The sender and a receiver of new weights are killed behind every one of their buckets, within a
whole run.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from pathlib import Path
from typing import Any

import chaos_run as chaos
import pytest
from chaos_world import KEEP_ALL, LIMIT_S, World, world

from bench.support.fleet import RunProcess

EVERY = os.environ.get("RL_CHAOS_BUCKETS", "") == "1"
TIMEOUT_S = 10.0  # longest wait for one bucket
STEPS = 480  # so many that there is always one to come, on a loaded machine too
BUCKET_MIB = 4096 / 2**20
# Delta: so small a step leaves most of what travels as bfloat16 as it was; that many buckets then
# take a larger model.
TRAIN: dict[str, dict[str, Any]] = {
    "whole": {"weights_backend": "gloo"},
    "shared": {"weights_backend": "shared"},
    "delta": {
        "weights_backend": "gloo",
        "weights_delta": True,
        "weights_full_every": 7,
        "weights_dtype": "bfloat16",
        "lr": 1e-6,
    },
}
INTERMEDIATE_SIZE = {"whole": 96, "shared": 96, "delta": 256}


async def strike(w: World, plugin: Path, victim: RunProcess, after: int) -> float:
    """Let it die behind so many buckets; the seconds until the next step was completed after that."""
    order, written = plugin.with_name("order.json"), plugin.with_name("order.new")
    victim.killed = True
    written.write_text(json.dumps({"who": victim.name, "after": after}))
    os.replace(written, order)
    await w.watch.until(lambda: not order.exists(), LIMIT_S)
    began, before = time.monotonic(), w.watch.step()
    await w.watch.until(lambda: w.watch.step() > before, LIMIT_S)
    return time.monotonic() - began


def serves(server: RunProcess, version: int, behind: int) -> bool:
    """Whether its log says, behind a place, that it serves this version or a newer one."""
    said = re.findall(r"serving version (\d+)", server.log.read_text()[behind:])
    return any(int(number) >= version for number in said)


@pytest.mark.skipif(
    not EVERY,
    reason="set RL_CHAOS_BUCKETS=1; tests/contract/test_weights.py kills both ends too, outside of a run",
)
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("sent", ["whole", "delta", "shared"])
async def test_both_ends_are_killed_behind_every_bucket(tmp_path: Path, sent: str) -> None:
    plugin = Path(shutil.copy(Path(__file__).with_name("bucket_strikes.py"), tmp_path))
    if sent == "shared":
        plugin.with_name("shared").touch()
    delays: dict[str, list[float]] = {"rollout": [], "learner": []}
    sections: dict[str, Any] = {
        "train": {
            "backend": f"{plugin}:Backend",
            "weights_bucket_mib": BUCKET_MIB,
            "weights_timeout_s": TIMEOUT_S,
            **TRAIN[sent],
        },
        "model": {
            "path": None,
            "tiny": {**chaos.TINY, "intermediate_size": INTERMEDIATE_SIZE[sent]},
        },
        "checkpoint": KEEP_ALL,
        "rollout": {"engine": f"{plugin}:Engine"},
    }
    async with world(tmp_path, "buckets", STEPS, pace_s=0.3, **sections) as w:
        await w.reach(2)
        planned = plugin.with_name("buckets.txt")
        await w.watch.until(planned.exists, LIMIT_S)
        num_buckets = int(planned.read_text())
        assert num_buckets >= 5
        for after in range(num_buckets + 1):
            server = w.fleet.of("rollout")[after % 2]
            behind, version = server.log.stat().st_size, w.watch.step()
            delays["rollout"].append(await strike(w, plugin, server, after))
            await w.watch.until(
                lambda server=server, version=version, behind=behind: serves(
                    server, version, behind
                ),
                LIMIT_S,
            )
            delays["learner"].append(await strike(w, plugin, w.fleet.of("learner")[0], after))
            behind, version = server.log.stat().st_size, w.watch.step()
            await w.watch.until(
                lambda server=server, version=version, behind=behind: serves(
                    server, version, behind
                ),
                LIMIT_S,
            )
        await w.finish()
    print(
        json.dumps(
            {"sent": sent, "buckets": num_buckets}
            | {role: [round(s, 1) for s in times] for role, times in delays.items()}
        )
    )
    assert max(delays["rollout"]) < TIMEOUT_S
