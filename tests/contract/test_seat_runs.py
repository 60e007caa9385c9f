"""A run by self-play against a past version on a server of its own, which is killed: nothing is
lost, and only the trained policy's seats are trained on.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from waits import LONG_S

from bench.distill import find_child
from broker.contract import wire
from learner.credit.archive import read_frames
from learner.reporting.metrics import read_lines
from rlearner.cli import main
from rlearner_text.config import TinyModel
from rlearner_text.tiny import build_tiny

SIZES = TinyModel(
    hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=64
)
STEPS = 5


def config(folder: Path) -> dict[str, Any]:
    game = {
        "env": "tic_tac_toe",
        "env_args": {"illegal": "random", "illegal_reward": -0.5},
        "group_size": 4,
        "max_turns": 5,
        "max_context_tokens": 128,
        "context": "steps",
        "memory": "present",
        "sampling": {"max_tokens": 2},
    }
    return {
        "run": {"name": "seats", "dir": str(folder / "runs")},
        "model": {"path": str(build_tiny(folder / "model", SIZES, seed=1))},
        "domains": {
            "selfplay": game | {"seats": {"X": "actor", "O": "actor"}},
            "league": game
            | {"seats": {"X": "actor", "O": ["past", "chance"]}, "rotate_seats": True},
            "check": game | {"seats": {"X": "chance", "O": "actor"}, "weight": 0},
        },
        "policies": {
            "past": {"model_path": str(build_tiny(folder / "past", SIZES, seed=2))},
            "chance": {"script": "random"},
        },
        "train": {"steps": STEPS, "groups_per_step": 4, "lr": 1e-3, "num_threads": 1},
        "eval": {"every_steps": STEPS, "tasks": 4, "domains": ["check"]},
        "rollout": {"max_context_tokens": 128, "max_running": 16, "num_threads": 1},
        "envhub": {"n": 16},
        "checkpoint": {"every_steps": 3},
        "trackers": {"use": []},
    }


async def run_up(folder: Path, settings: dict[str, Any], *, kills: int) -> str:
    """Run `rlearner up`, kill the past version's server after each of the first steps."""
    file = folder / "run.yaml"
    file.write_text(json.dumps(settings))
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "rlearner.cli", "up", str(file), "--json",
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert process.stdout is not None
    lines = []
    async with asyncio.timeout(6 * LONG_S):
        async for line in process.stdout:
            lines.append(line.decode())
            is_step = line.startswith(b'{"event": "step"') or b'"step"' in line[:40]
            if is_step and kills and (pid := find_child(process.pid, "policy-past")) is not None:
                os.kill(pid, signal.SIGKILL)
                kills -= 1
        code = await process.wait()
    output = "".join(lines)
    assert code == 0, output
    assert kills == 0, output
    return output


@pytest.mark.timeout(600)
def test_a_league_whose_server_is_killed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asyncio.run(run_up(tmp_path, config(tmp_path), kills=2))
    run = tmp_path / "runs" / "seats"
    last = read_lines(run / "metrics.jsonl")[-1]
    assert last["step"] == STEPS
    assert (last["ticket/dead"], last["ticket/open"]) == (0, 0)
    assert "eval/domain/check/success_rate" in last
    assert main(["audit", "seats", "--dir", str(run.parent), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["lost"] == 0

    seats: dict[str, set[str]] = {}
    for frame in read_frames(run / "samples"):
        message = frame.record().message
        if not isinstance(message, wire.Group):
            continue
        own = {(each.episode, each.seat) for each in message.trajectories}
        numbers = {number for number, _ in own}
        # every seat of the policy is an episode of its own in the record
        assert numbers == set(range(8 if message.domain == "selfplay" else 4))
        assert all(each.loss_mask.array().any() for each in message.trajectories)
        seats.setdefault(message.domain, set()).update(seat for _, seat in own)
    assert seats["selfplay"] == {"X", "O"}
    # rotated by the task
    assert seats["league"] == {"X", "O"}
