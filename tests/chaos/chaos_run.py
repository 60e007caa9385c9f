"""A small run for tests that kill: two domains, one scored by reward hubs, on a model of a few
thousand parameters.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from bench.support.fleet import RunFleet
from broker.settings.runspec import validate
from learner.prepare import to_yaml

ROOT = Path(__file__).parents[2]
TINY = {
    "hidden_size": 16,
    "num_layers": 1,
    "num_heads": 1,
    "num_kv_heads": 1,
    "head_dim": 16,
    "intermediate_size": 32,
}
REWARD = '''"""A reward that takes as long as a file says, in seconds."""

import time
from pathlib import Path


def length(sample):
    time.sleep(float((Path(__file__).parent / "pace").read_text()))
    return min(1.0, len(sample.response) / 8)
'''
GROUPS = 4
MAX_STALENESS = 1
OPTIONS = {"rollout": ("--gpus", "cpu")}


def config(
    folder: Path, run: str, *, steps: int, pace_s: float = 0.05, **sections: dict[str, Any]
) -> dict[str, Any]:
    """The run's configuration, checked.

    Args:
        pace_s: how long a reward takes at first, which keeps steps from being over too soon; see
            ``set_pace``.
    """
    (folder / "sums.jsonl").write_text(
        "".join(f'{{"question": "{n}+{n}=", "answer": "{2 * n}"}}\n' for n in range(200)),
        encoding="utf-8",
    )
    (folder / "length_reward.py").write_text(REWARD, encoding="utf-8")
    set_pace(folder, pace_s)
    common = {
        "group_size": 2,
        "max_context_tokens": 64,
        "deadline_s": 90,
        "sampling": {"max_tokens": 4},
    }
    reward = {"name": f"{folder / 'length_reward.py'}:length"}
    merged: dict[str, Any] = {
        "run": {"name": run, "dir": str(folder / "runs"), "seed": 5},
        "model": {"path": None, "tiny": TINY},
        "domains": {
            "sums": {
                **common,
                "env": "qa",
                "env_args": {"path": str(folder / "sums.jsonl")},
                "rewards": [reward],
            },
            "lake": {
                **common,
                "env": "frozenlake",
                "env_args": {"observe": "cell"},
                "max_turns": 3,
            },
        },
        "train": {
            "steps": steps,
            "groups_per_step": GROUPS,
            "max_staleness": MAX_STALENESS,
            "micro_batch_tokens": 128,
            "lr": 1e-3,
            "num_threads": 1,
            # beyond the hubs' deadline, within the patience of the tests
            "ticket_timeout_s": 120.0,
        },
        "checkpoint": {"every_steps": 5},
        "samples": {"keep": True},
        "trackers": {"use": []},
        "rollout": {"engine": "hf", "max_running": 32, "max_context_tokens": 64, "num_threads": 1},
        "envhub": {"n": 16},
        "rewardhub": {"workers": 1},
    }
    for section, values in sections.items():
        merged[section] = {**merged.get(section, {}), **values}
    return validate(merged)


def set_pace(folder: Path, pace_s: float) -> None:
    """How long every reward takes from now on, in seconds."""
    new = folder / "pace.new"
    new.write_text(str(pace_s), encoding="utf-8")
    new.rename(folder / "pace")


def write(folder: Path, values: dict[str, Any]) -> Path:
    """The configuration as a file for ``rlearner start``."""
    file = folder / "run.yaml"
    file.write_text(to_yaml(values), encoding="utf-8")
    return file


def start_all(fleet: RunFleet, file: Path, each: int = 2) -> None:
    """The learner, and ``each`` of every other role."""
    fleet.add("learner", "learner", "start", str(file))
    for number in range(each):
        for role in ("rollout", "envhub", "rewardhub"):
            fleet.add(role, f"{role}-{number}", *OPTIONS.get(role, ()))


def start_tap(fleet: RunFleet, out: Path) -> subprocess.Popen[bytes]:
    """A tap in a process of its own; it sees everything from here on."""
    command = [
        sys.executable,
        "-m",
        "rlearner.audit.tap",
        "--broker",
        fleet.url,
        "--run",
        fleet.run,
        "--out",
        str(out),
    ]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT)
    assert child.stdout is not None
    assert child.stdout.readline() == b"ready\n"
    return child


def stop_tap(child: subprocess.Popen[bytes]) -> None:
    child.terminate()
    child.wait(60)
    assert child.stdout is not None
    child.stdout.close()
