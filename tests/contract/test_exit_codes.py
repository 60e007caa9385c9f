"""Exit codes of whole runs: ended by a signal, by the operator, and after the last step. Real
processes on a private broker.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from waits import LONG_S, until

from learner.checkpoints import checkpoint

LIMIT_S = 3 * LONG_S  # of one life of a whole run
SETTINGS = [
    "configs/quickstart.yaml",
    "run.name=codes",
    "model.tiny={hidden_size: 16, num_layers: 1, num_heads: 1, num_kv_heads: 1, head_dim: 16, intermediate_size: 32, "
    "vocab: chars}",
    "warm_start.steps=0",
    "eval.every_steps=0",
    "domains.lake.group_size=2",
    "domains.lake.max_turns=2",
    "train.groups_per_step=1",
]


@asynccontextmanager
async def up(folder: Path, *settings: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """``rlearner up``, killed if the test ends before it does; its output goes to ``up.log``."""
    with (folder / "up.log").open("ab") as log:
        child = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "rlearner.cli",
            "up",
            *SETTINGS,
            f"run.dir={folder}",
            *settings,
            stdout=log,
            stderr=log,
        )
    try:
        async with asyncio.timeout(LIMIT_S):
            yield child
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()


async def trains(child: asyncio.subprocess.Process, folder: Path, past: int) -> None:
    """Return once the run has made more steps than ``past``."""
    rows = folder / "codes" / "metrics.jsonl"
    await until(
        lambda: (
            child.returncode is not None or (rows.exists() and rows.read_text().count("\n") > past)
        ),
        LIMIT_S,
    )
    assert child.returncode is None, (folder / "up.log").read_text()


async def test_a_run_ends_with_130_until_all_its_steps_are_made(tmp_path: Path) -> None:
    async with up(tmp_path, "train.steps=100000") as child:
        await trains(child, tmp_path, 0)
        child.send_signal(signal.SIGTERM)
        assert await child.wait() == 130
    made = checkpoint.newest_checkpoint(tmp_path / "codes" / "checkpoints")
    assert made is not None
    async with up(tmp_path, "train.steps=100000") as child:
        await trains(child, tmp_path, made.step)
        stop = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "rlearner.cli",
            "stop",
            "codes",
            "--dir",
            str(tmp_path),
            env=os.environ,
        )
        assert await stop.wait() == 0
        assert await child.wait() == 130
    assert "learner ended with exit code 130" in (tmp_path / "up.log").read_text()
    made = checkpoint.newest_checkpoint(tmp_path / "codes" / "checkpoints")
    assert made is not None
    for steps in (made.step + 1, made.step + 1):  # makes the last step; has nothing left to do
        async with up(tmp_path, f"train.steps={steps}", "--json") as child:
            assert await child.wait() == 0, (tmp_path / "up.log").read_text()
    lines = (tmp_path / "up.log").read_text().splitlines()
    events = [json.loads(line) for line in lines if line.startswith('{"event"')]
    assert (events[0]["event"], events[0]["folder"]) == ("started", str(tmp_path / "codes"))
    assert [one["figures"]["ticket/issued"] > 0 for one in events if one["event"] == "step"] == [
        True
    ]
    ended, done = events[-2:]
    assert (ended["event"], ended["step"], ended["failed"]) == ("ended", made.step + 1, [])
    assert (done["event"], done["steps"]) == ("completed", made.step + 1)
    assert (
        done["next"]
        == f"go on with this run: rlearner up {tmp_path / 'codes'} train.steps={2 * (made.step + 1)}"
    )
    assert "changed since the last start: broker" not in (tmp_path / "up.log").read_text()
    for role in ("rollout-server", "envhub", "rewardhub"):
        assert "Traceback" not in (tmp_path / "codes" / "logs" / f"{role}.log").read_text()
