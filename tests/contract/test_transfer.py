"""A run that trains on lakes and is evaluated on lakes and on Sokoban, with a restart in between."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from waits import LONG_S

from broker.contract import wire
from learner.credit.archive import read_frames
from learner.reporting.metrics import read_lines
from rlearner.ops.drawing import metric_curve

SETTINGS = [
    "run.name=moved",
    "model.tiny={hidden_size: 16, num_layers: 1, num_heads: 1, num_kv_heads: 1, head_dim: 16, "
    "intermediate_size: 32, vocab: chars}",
    "warm_start.steps=0",
    "domains.lake.group_size=2",
    "domains.lake.max_turns=2",
    "domains.sokoban.max_turns=3",
    "domains.sokoban.eval={tasks: 2, group_size: 3, temperature: 0.5}",
    "train.groups_per_step=2",
    "eval.every_steps=2",
    "eval.tasks=4",
    "eval.baseline=''",
    "samples.keep=true",
]
TASKS = [("lake", 0), ("lake", 1), ("lake", 2), ("lake", 3), ("sokoban", 0), ("sokoban", 1)]
RATES = [f"eval/domain/{name}/success_rate" for name in ("lake", "sokoban")]


async def run_up(folder: Path, *words: str) -> str:
    """Run ``rlearner up`` to its end and return what it printed."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "rlearner.cli", "up", *words),
        cwd=folder,
        env=environment,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    printed, _ = await asyncio.wait_for(child.communicate(), 3 * LONG_S)
    assert child.returncode == 0, printed.decode()
    return printed.decode()


def episodes(run: Path, step: int) -> list[dict[str, Any]]:
    return read_lines(run / "evals" / f"actor-step-{step:06d}.jsonl")


@pytest.mark.timeout(900)
async def test_transfer_is_a_curve_of_the_run(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "moved"
    await run_up(tmp_path, "transfer", *SETTINGS, "train.steps=2")
    await run_up(tmp_path, str(run), "train.steps=4")

    lines = read_lines(run / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    for name in RATES:
        steps, rates = metric_curve(lines, name)
        assert steps == [0, 2, 4]
        assert all(0 <= rate <= 1 for rate in rates)
    for line in lines:
        assert "reward/lake/mean" in line
        assert "reward/sokoban/mean" not in line

    for step in (0, 2, 4):
        rows = episodes(run, step)
        assert [(row["domain"], row["task_index"]) for row in rows] == TASKS
        assert [len(row["reward"]) for row in rows] == [1, 1, 1, 1, 3, 3]
        assert [row["prompt"] for row in rows] == [row["prompt"] for row in episodes(run, 0)]
        assert all(max(row["turns"]) <= 3 for row in rows)
        (line,) = [line for line in lines if line.get("eval/step") == step]
        turns = [count for row in rows if row["domain"] == "sokoban" for count in row["turns"]]
        assert line["eval/domain/sokoban/num_turns"] == pytest.approx(sum(turns) / 6)
        tokens = [count for row in rows if row["domain"] == "lake" for count in row["tokens"]]
        assert line["eval/domain/lake/episode_tokens_mean"] == pytest.approx(sum(tokens) / 4)

    records = [frame.record().message for frame in read_frames(run / "samples")]
    groups = [record for record in records if isinstance(record, wire.Group)]
    assert len(groups) >= 8
    assert {group.domain for group in groups} == {"lake"}
    assert {group.eval_step for group in groups} == {-1}
