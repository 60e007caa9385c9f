"""A teacher behind a rollout server teaches what it would teach beside the student; a server that
dies is replaced.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from rlearner import cli
from rlearner_text.config import TinyModel
from rlearner_text.tiny import build_tiny

SIZES = TinyModel(
    hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=64
)


def serve(url: str, run: str, name: str) -> subprocess.Popen[bytes]:
    command = [
        sys.executable,
        "-m",
        "rollout.cli",
        "--broker",
        url,
        "--run",
        run,
        "--id",
        name,
        "--gpus",
        "cpu",
    ]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=env)


def losses(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["train/loss"] for line in lines if "train/loss" in line] + [lines[-1]["eval/loss"]]


@pytest.mark.timeout(300)  # two processes import torch, on a busy machine
def test_a_served_teacher(
    broker_url: str, run_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = torch.get_num_threads()
    student, teacher = (
        build_tiny(tmp_path / "student", SIZES, seed=1),
        build_tiny(tmp_path / "teacher", SIZES, seed=2),
    )
    rows = [
        {"prompt": "abc"[: 1 + n % 3] * (1 + n), "response": "LDRU"[n % 4] * 3} for n in range(10)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {
        "run.dir": tmp_path, "model.path": student, "data.train": tmp_path / "rows.jsonl", "data.eval_share": 0.2,
        "distill.teacher": teacher, "distill.top_k": 8, "train.steps": 6, "train.batch_size": 4, "train.lr": 1e-2,
        "train.num_threads": 1, "train.warmup_steps": 0,
    }  # fmt: skip
    words = [
        "distill",
        "configs/distill.yaml",
        *(f"{key}={value}" for key, value in settings.items()),
    ]
    assert cli.main([*words, "run.name=here"]) == 0

    servers = [serve(broker_url, run_name, name) for name in ("one", "two")]
    from learner.offline import run

    step = run._Loop._step

    def disturbed(self: Any, number: int, *rest: Any) -> None:
        if number == 4:  # one of them dies; the other goes on
            servers[0].send_signal(signal.SIGKILL)
        step(self, number, *rest)

    monkeypatch.setattr(run._Loop, "_step", disturbed)
    try:
        overrides = ["distill.served=true", "rollout.num_threads=1", f"run.name={run_name}"]
        assert cli.main([*words, *overrides, "--broker", broker_url]) == 0
        until = time.monotonic() + 60.0
        while servers[1].poll() is None and time.monotonic() < until:
            time.sleep(0.1)
        assert servers[1].returncode == 0  # the run is over, and so is it
    finally:
        for server in servers:
            server.kill()
            server.communicate()
        torch.set_num_threads(before)
    assert losses(tmp_path / run_name) == pytest.approx(losses(tmp_path / "here"), rel=1e-3)
