"""True on-policy training with real processes: every importance ratio is exactly 1."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

SETTINGS = [
    "configs/quickstart.yaml",
    "run.name=exact",
    "train.steps=3",
    "train.groups_per_step=4",
    "train.max_staleness=0",
    "train.device=cpu",
    "domains.lake.group_size=4",
    "domains.lake.max_turns=4",
    "algorithm.filter_zero_variance=false",
    "warm_start.steps=0",
    "eval.every_steps=0",
    # Nothing is solved, so only the entropy has a gradient.
    "algorithm.entropy_coef=0.01",
    "envhub.n=16",
    "rollout.exact=true",
]


def up(folder: Path, *settings: str) -> list[dict[str, Any]]:
    """Run ``rlearner up`` to its end; return the metrics of each step."""
    command = [sys.executable, "-m", "rlearner.cli", "up", *SETTINGS, f"run.dir={folder}"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, *settings], capture_output=True, text=True, timeout=300, env=env, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (folder / "exact" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def test_ratios_are_exactly_one_at_staleness_0(tmp_path: Path) -> None:
    steps = up(tmp_path)
    assert [step["step"] for step in steps] == [1, 2, 3]
    for step in steps:
        assert step["actor/num_tokens"] > 0
        assert step["staleness/max"] == 0
        assert step["rollout_corr/is_mean"] == 1.0
        assert step["rollout_corr/kl"] == 0.0
        assert step["rollout_corr/k3_kl"] == 0.0
        assert step["rollout_corr/ess"] == 1.0
    assert steps[1]["actor/grad_norm"] > 0


def test_check_refuses_other_engines_in_one_line(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "rlearner.cli", "check", *SETTINGS),
            *("rollout.engine=vllm", f"run.dir={tmp_path}"),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr == (
        "error: rollout.exact: True is not allowed; false with rollout.engine vllm: "
        "only hf computes as the learner\n"
    )
