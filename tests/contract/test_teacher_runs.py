"""A run with a teacher on a server of its own, which is killed: nothing is lost, every trained
token has its score, and without a teacher no ticket's time runs.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file
from waits import LONG_S

from bench.distill import find_child
from broker.contract import wire
from learner.credit.archive import read_frames
from learner.reporting.metrics import read_lines
from rlearner.cli import main
from rlearner_text.config import TinyModel
from rlearner_text.tiny import build_tiny
from rollout.config import RolloutSection
from rollout.engines.base import EngineConfig
from rollout.engines.hf.model import SlotModel

SIZES = TinyModel(
    hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=64
)
STEPS = 6


def config(folder: Path, **distillation: Any) -> dict[str, Any]:
    student = str(build_tiny(folder / "student", SIZES, seed=1))
    teacher = str(build_tiny(folder / "teacher", SIZES, seed=2))
    _sharpen(Path(teacher) / "model.safetensors")
    lake = {
        "env": "frozenlake",
        "group_size": 2,
        "max_turns": 3,
        "max_context_tokens": 128,
        "sampling": {"max_tokens": 3},
        "teacher": "big",
    }
    train = {"steps": STEPS, "groups_per_step": 4, "lr": 1e-3, "num_threads": 1}
    return {
        "run": {"name": "taught", "dir": str(folder / "runs")},
        "model": {"path": student},
        "domains": {"lake": lake},
        "teachers": {"big": {"model_path": teacher, "top_k": 4 if distillation else 0}},
        "train": train,
        "algorithm": {"adv_estimator": "reinforce", "distillation": distillation},
        "rollout": {"max_context_tokens": 128, "max_running": 16, "num_threads": 1},
        "envhub": {"n": 8},
        "checkpoint": {"every_steps": 3},
        "trackers": {"use": []},
    }


def _sharpen(file: Path) -> None:
    """Multiply the logits of a model, whose random weights make all tokens about equally likely."""
    weights = load_file(file)
    weights["model.norm.weight"] *= 20
    save_file(weights, file, metadata={"format": "pt"})


async def run_up(folder: Path, settings: dict[str, Any], *, kills: int) -> str:
    """Run `rlearner up`, kill the teacher's server after each of the first steps."""
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
            if is_step and kills and (pid := find_child(process.pid, "teacher-big")) is not None:
                os.kill(pid, signal.SIGKILL)
                kills -= 1
        code = await process.wait()
    output = "".join(lines)
    assert code == 0, output
    assert kills == 0, output
    return output


@pytest.mark.timeout(600)
def test_a_teacher_that_is_killed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = config(tmp_path)
    asyncio.run(run_up(tmp_path, settings, kills=2))
    run = tmp_path / "runs" / "taught"
    rows = read_lines(run / "metrics.jsonl")
    last = rows[-1]
    assert last["step"] == STEPS
    assert (last["ticket/dead"], last["ticket/open"]) == (0, 0)
    assert all(row["teacher/scored_ratio"] == 1.0 for row in rows)
    audit = ["audit", "taught", "--dir", str(run.parent), "--json"]
    assert main(audit) == 0
    assert json.loads(capsys.readouterr().out)["lost"] == 0

    # Each score is the teacher's own, computed once more.
    model = SlotModel(
        EngineConfig(settings["teachers"]["big"]["model_path"], RolloutSection(max_running=2)),
    )
    num_scored = 0
    for frame in read_frames(run / "samples"):
        message = frame.record().message
        if not isinstance(message, wire.Group):
            continue
        for trajectory in message.trajectories:
            teacher = trajectory.teacher
            assert teacher is not None
            assert (teacher.policy, teacher.version) == ("big", 0)
            ids = trajectory.token_ids.array().tolist()
            expected = np.array([0.0, *model.score_context(ids, 0).logprobs])
            expected *= trajectory.loss_mask.array()
            np.testing.assert_allclose(teacher.logprobs.array(), expected, atol=1e-4)
            num_scored += 1
    assert num_scored >= STEPS * 4 * 2


@pytest.mark.timeout(600)
def test_the_divergence_from_a_teachers_candidates_falls(tmp_path: Path) -> None:
    settings = config(tmp_path, use="loss", kl="forward")
    settings["train"] |= {"lr": 1e-2, "warmup_steps": 0}
    asyncio.run(run_up(tmp_path, settings, kills=0))
    losses = [row["teacher/loss"] for row in read_lines(tmp_path / "runs/taught/metrics.jsonl")]
    assert losses[-1] < 0.8 * losses[0]
