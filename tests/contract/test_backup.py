"""A run copied as docs/operations.md says, while it is stopped and while it trains, continues from
the copy.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest
from waits import LONG_S, until

from learner.reporting.metrics import read_lines

LIMIT_S = 3 * LONG_S
SETTINGS = [
    "quickstart",
    "run.name=kept",
    "model.tiny={hidden_size: 16, num_layers: 1, num_heads: 1, num_kv_heads: 1, head_dim: 16, intermediate_size: 32, "
    "vocab: chars}",
    "warm_start.steps=0",
    "eval.every_steps=0",
    "domains.lake.group_size=2",
    "domains.lake.max_turns=2",
    "train.groups_per_step=1",
    "checkpoint.every_steps=2",
    "samples.keep=true",
]
ONLY_ALONE = pytest.mark.skipif(
    not os.environ.get("RL_BACKUP"), reason="a minute long: make test-backup"
)
NOT_LIVE = ("broker", "broker.keys", ".lock", "broker.url")  # what a copy of a live run leaves out


async def start(folder: Path, *words: str) -> asyncio.subprocess.Process:
    """Start a command in a folder; its output goes to a file there."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with (folder / "out.log").open("ab") as log:
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "rlearner.cli",
            *words,
            cwd=folder,
            env=environment,
            stdout=log,
            stderr=log,
        )


async def ran(folder: Path, *words: str) -> tuple[int, str]:
    """Return a command's exit code and what it printed."""
    (folder / "out.log").write_text("")
    child = await start(folder, *words)
    return await asyncio.wait_for(child.wait(), LIMIT_S), (folder / "out.log").read_text()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("copied", ["stopped", pytest.param("live", marks=ONLY_ALONE)])
async def test_a_copy_continues_elsewhere(copied: str, tmp_path: Path) -> None:
    first, other = tmp_path / "first", tmp_path / "other"
    first.mkdir()
    run, copy = first / "runs" / "kept", other / "runs" / "kept"
    child = await start(first, "up", *SETTINGS, "train.steps=100000")
    rows = run / "metrics.jsonl"
    try:
        await until(
            lambda: child.returncode is not None or (rows.exists() and len(read_lines(rows)) > 6),
            LIMIT_S,
        )
        assert child.returncode is None, (first / "out.log").read_text()
        if copied == "live":
            shutil.copytree(run, copy, ignore=shutil.ignore_patterns(*NOT_LIVE))
    finally:
        if child.returncode is None:
            child.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(child.wait(), LIMIT_S) == 130
    if copied == "stopped":
        shutil.copytree(run, copy)
    made = len(read_lines(copy / "metrics.jsonl"))
    words = ["up", "runs/kept", f"train.steps={made + 4}"]
    if copied == "live":
        code, out = await ran(other, *words)
        assert code == 2
        assert "--rebase" in out.splitlines()[-1]
        words.append("--rebase")
    code, out = await ran(other, *words)
    assert code == 0, out
    assert [row["step"] for row in read_lines(copy / "metrics.jsonl")] == list(range(1, made + 5))
    code, out = await ran(other, "audit", "kept", "--json")
    found = json.loads(out.splitlines()[-1])
    assert (code, found["problems"]) == (0, []), out
    assert (found["trained_twice"], found["open"]) == (0, 0)
    assert found["lost"] == 0
    assert copied == "live" or found["dead"] == 0
