"""``train.profile.steps`` with real processes: traces and tables of learner and server."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ENV = {**os.environ, "OMP_NUM_THREADS": "1"}
SETTINGS = [
    "configs/quickstart.yaml",
    "run.name=profiled",
    "train.groups_per_step=2",
    "train.device=cpu",
    "domains.lake.group_size=2",
    "domains.lake.max_turns=2",
    "algorithm.filter_zero_variance=false",
    "warm_start.steps=0",
    "eval.every_steps=0",
    # Nothing is solved, so only the entropy has a gradient.
    "algorithm.entropy_coef=0.01",
    "envhub.n=8",
]


def rlearner(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rlearner.cli", *words],
        capture_output=True,
        text=True,
        timeout=300,
        env=ENV,
        check=False,
    )


def operators(path: Path) -> set[str]:
    with gzip.open(path, "rt") as lines:
        return {event["name"] for event in json.load(lines)["traceEvents"] if "name" in event}


@pytest.mark.parametrize(
    "backend", [["torch"], ["ddp", "train.ranks=2"], ["fsdp2", "train.ranks=2"]], ids=lambda b: b[0]
)
def test_a_run_writes_traces_and_tables(backend: list[str], tmp_path: Path) -> None:
    name, *more = backend
    done = rlearner(
        *("up", *SETTINGS, f"run.dir={tmp_path}", f"train.backend={name}", *more),
        *("train.steps=4", "train.profile.steps=2-3"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    folder = tmp_path / "profiled" / "profile"
    written = sorted(path.name for path in folder.iterdir())
    assert written == [
        "learner-step-2.json.gz",
        "learner-step-3.json.gz",
        "learner.txt",
        "rollout-1-step-2.json.gz",
        "rollout-1-step-3.json.gz",
        "rollout-1.txt",
    ]
    learner = operators(folder / "learner-step-2.json.gz")
    # of the backward pass and the optimizer
    assert any("Backward" in name for name in learner)
    assert {"aten::mm", "aten::_fused_adamw_"} & learner
    server = operators(folder / "rollout-1-step-2.json.gz")
    assert "aten::scaled_dot_product_attention" in server
    assert not any("Backward" in name for name in server)
    table = (folder / "learner.txt").read_text().splitlines()
    assert table[0].startswith("step 2, 3: ")
    assert len(table) == 12
    log = (tmp_path / "profiled" / "logs" / "learner.log").read_text()
    assert log.count(table[0]) == 1
    status = rlearner("status", "profiled", "--dir", str(tmp_path)).stdout
    assert "learner-step-2.json.gz" in status


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ("12-10", "a step or a range of at most 10, for example 10-12"),
        ("1-11", "a step or a range of at most 10, for example 10-12"),
        ("39-41", "steps up to train.steps, which is 40"),
    ],
)
def test_check_refuses_other_steps_in_one_line(steps: str, said: str) -> None:
    done = rlearner("check", "configs/quickstart.yaml", f"train.profile.steps={steps}")
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: train.profile.steps: '{steps}' is not allowed; ")
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
