"""Runs a simulated fleet as real processes on a real broker: sampling, environments, rewards and
training sleep.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from bench.advice.plugins import SPEEDS
from bench.advice.speeds import FleetSpeeds
from bench.support.fleet import MODULES, RunFleet, RunProcess
from broker.settings.run_settings import RunSettings
from broker.settings.runspec import check_settings
from learner.prepare import to_yaml
from learner.reporting.metrics import read_lines

HERE: Final = Path(__file__).parent
RUN: Final = "advice"
Rows = list[dict[str, Any]]
TINY: Final = {
    "hidden_size": 16,
    "num_layers": 1,
    "num_heads": 1,
    "num_kv_heads": 1,
    "head_dim": 16,
} | {"intermediate_size": 32}


def run_at_once(
    fleets: Sequence[FleetSpeeds], steps: int, folder: Path
) -> list[tuple[Rows, RunSettings]]:
    """Run fleets at the same time, which only sleep; return the lines of metrics.jsonl and the
    settings of each.
    """
    places = [folder / str(number) for number in range(len(fleets))]
    checked = [
        _write_settings(speeds, steps, place) for speeds, place in zip(fleets, places, strict=True)
    ]

    async def run_all() -> list[Rows]:
        return await asyncio.gather(
            *(_run(speeds, place) for speeds, place in zip(fleets, places, strict=True))
        )

    return list(zip(asyncio.run(run_all()), checked, strict=True))


async def _run(speeds: FleetSpeeds, folder: Path) -> Rows:
    async with RunFleet(folder, RUN) as fleet:
        variables = {SPEEDS: json.dumps(asdict(speeds))}

        def add(role: str, name: str, *arguments: str) -> None:
            own = [] if role == "learner" else ["--run", RUN, "--id", name]
            command = [sys.executable, "-m", MODULES[role], *arguments, "--broker", fleet.url, *own]
            fleet.start(RunProcess(name, role, command, folder / f"{name}.log", env=variables))

        add("learner", "learner", "start", str(folder / "run.yaml"))
        for role, count in (("rollout", speeds.servers), ("envhub", speeds.hubs)):
            for number in range(count):
                add(role, f"{role}-{number}")
        for number in range(speeds.reward_hubs if speeds.score_s else 0):
            add("rewardhub", f"rewardhub-{number}")
        await fleet.wait_done(fleet.of("learner"))
        if fleet.crashes:
            raise RuntimeError(fleet.crashes[0])
    return await asyncio.to_thread(read_lines, folder / RUN / "metrics.jsonl")


def _write_settings(speeds: FleetSpeeds, steps: int, folder: Path) -> RunSettings:
    folder.mkdir(parents=True)
    checked = check_settings(settings(speeds, steps, folder))
    (folder / "run.yaml").write_text(to_yaml(checked.to_plain()))
    return checked


def settings(speeds: FleetSpeeds, steps: int, folder: Path) -> dict[str, Any]:
    """Return the configuration of the run."""
    plugins = HERE / "plugins.py"
    domain: dict[str, Any] = {"env": f"{plugins}:SlowEnvironment", "group_size": speeds.group_size}
    domain |= {
        "group_size_redundancy": speeds.redundancy,
        "max_turns": speeds.turns,
        "max_context_tokens": 4096,
    }
    domain |= {"sampling": {"max_tokens": speeds.most}}
    domain |= {"rewards": [{"name": f"{plugins}:score"}] if speeds.score_s else []}
    train: dict[str, Any] = {
        "backend": f"{HERE / 'backend.py'}:PacedBackend",
        "steps": steps,
        "num_threads": 1,
    }
    train |= {"groups_per_step": speeds.groups_per_step, "max_staleness": speeds.max_staleness}
    train |= {"micro_batch_tokens": 4096}
    config: dict[str, Any] = {
        "run": {"name": RUN, "dir": str(folder)},
        "model": {"path": None, "tiny": TINY},
    }
    config |= {"domains": {"simulated": domain}, "train": train, "trackers": {"use": []}}
    config |= {
        "rollout": {
            "engine": f"{plugins}:PacedEngine",
            "max_running": speeds.slots,
            "max_context_tokens": 4096,
        }
    }
    config |= {
        "rewardhub": {"workers": speeds.workers, "pass_env": [SPEEDS]},
        "envhub": {"n": speeds.envs},
    }
    return config
