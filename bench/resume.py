"""Check that a learner that was killed and resumed trains to identical bits: ``python -m
bench.resume [--steps 50]``.

A learner trains a small model on generated groups and is killed (SIGKILL) at random moments; each
time it is restarted and resumes. Then ``rlearner replay`` trains once more, undisturbed and without
a broker, on the records that the learner archived: every number of every step, and every tensor of
the remaining checkpoints (weights, optimizer, schedule, RNG), must be the same.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from bench.support import made_up_hub
from bench.support.fleet import RunFleet
from broker.contract import wire
from broker.contract.streams import SAMPLES, TICKETS
from broker.jetstream.bus import Bus
from broker.settings.runspec import validate
from learner.prepare import to_yaml
from learner.reporting.metrics import read_lines

RUN: Final = "resume"
TINY: Final = {
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 2,
    "num_kv_heads": 2,
    "head_dim": 16,
    "intermediate_size": 64,
}
PROMPT = 12
RESPONSE = 20
LIMIT_S: Final = 240.0


def config(
    folder: Path,
    steps: int,
    every: int,
    keep: bool | int = True,
    domain: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any]:
    """Return a configuration with one domain whose environment never runs.

    Args:
        domain: further settings of it.
    """
    lake: dict[str, Any] = {
        "env": "frozenlake",
        "group_size": 4,
        "max_context_tokens": 64,
        "deadline_s": 60,
    }
    lake |= {"sampling": {"max_tokens": 32}, **domain}
    train = {
        "steps": steps,
        "groups_per_step": 4,
        "micro_batch_tokens": 256,
        "lr": 1e-3,
        "num_threads": 1,
    }
    config: dict[str, Any] = {"run": {"name": RUN, "dir": str(folder), "seed": 11}}
    config |= {"model": {"path": None, "tiny": TINY}, "domains": {"lake": lake}, "train": train}
    config |= {"algorithm": {"entropy_coef": 0.001}, "rollout": {"max_context_tokens": 64}}
    config |= {
        "checkpoint": {"every_steps": every},
        "samples": {"keep": keep},
        "trackers": {"use": []},
    }
    return validate(config)


def group(ticket: wire.Ticket, rng: random.Random) -> wire.Group:
    """Return a group of reproducible random tokens and rewards."""
    numbers = np.random.default_rng([ticket.number, rng.randrange(1 << 30)])
    trajectories = []
    for episode in range(4):
        reward = float(numbers.random())
        token_ids = numbers.integers(6, 60, PROMPT + RESPONSE).tolist()
        logprobs = (-3 - numbers.random(RESPONSE)).tolist()
        version = ticket.min_version
        success = reward > 0.5
        made = made_up_hub.trajectory(
            episode, token_ids, logprobs, version=version, reward=reward, success=success
        )
        trajectories.append(made)
    return made_up_hub.group(ticket, trajectories)


async def answer(bus: Bus, seed: int, pace_s: float) -> None:
    """Take tickets and store their groups in an order that the clock decides, until cancelled."""
    rng = random.Random(seed)
    queue = await bus.work_queue(TICKETS, "lake")
    while True:
        deliveries = await queue.fetch(4, 5.0)
        rng.shuffle(deliveries)
        for delivery in deliveries:
            assert isinstance(delivery.message, wire.Ticket)
            await asyncio.sleep(rng.random() * pace_s)
            await bus.publish(SAMPLES, group(delivery.message, rng), ticket=delivery.message.number)
            await delivery.ack()


async def disturbed(
    folder: Path,
    steps: int,
    resumes: int,
    seed: int,
    keep: bool | int = True,
    domain: Mapping[str, Any] = MappingProxyType({}),
) -> int:
    """Train with kills into ``folder/runs``; return how often the learner resumed from a
    checkpoint.
    """
    rng = random.Random(seed)
    file = folder / "run.yaml"
    plain = config(folder / "runs", steps, 3, keep, domain)
    file.write_text(to_yaml(plain), encoding="utf-8")
    moments = sorted(rng.sample(range(4, steps - 1), resumes))
    metrics = folder / "runs" / RUN / "metrics.jsonl"
    async with RunFleet(folder / "fleet", RUN) as fleet:
        bus = await Bus.connect(fleet.url, RUN, name="bench", deadline_s=60)
        await bus.ensure_streams()
        work = asyncio.create_task(answer(bus, seed, 0.05))
        learner = fleet.add("learner", "learner", "start", str(file))
        for lives, moment in enumerate(moments, start=1):
            await _until(lambda lives=lives: learner.log.read_text().count(" training\n") >= lives)  # type: ignore[misc]
            await _until(
                lambda moment=moment: (  # type: ignore[misc]
                    bool(lines := read_lines(metrics)) and lines[-1]["step"] >= moment
                )
            )
            await asyncio.sleep(rng.random() * 0.3)
            learner.kill()
        await fleet.wait_done([learner], LIMIT_S)
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        await bus.close()
        if fleet.crashes:
            raise RuntimeError("\n".join(fleet.crashes))
    return learner.log.read_text().count("resuming from")


def undisturbed(folder: Path, first: int, last: int) -> dict[str, Any]:
    """Return what ``rlearner replay`` finds; see ``rlearner/ops/replaying.py``."""
    command = [
        sys.executable,
        "-m",
        "rlearner.cli",
        "replay",
        RUN,
        "--dir",
        str(folder / "runs"),
        "--json",
    ]
    command += ["--from", str(first), "--to", str(last)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=10 * LIMIT_S, check=False
    )
    if not done.stdout.startswith("{"):
        raise RuntimeError(done.stderr)
    figures: dict[str, Any] = json.loads(done.stdout)
    return figures | {"code": done.returncode}


async def _until(what: Callable[[], bool]) -> None:
    began = time.monotonic()
    while not what():
        if time.monotonic() - began > LIMIT_S:
            raise TimeoutError("the learner does not get on")
        await asyncio.sleep(0.02)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--resumes", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rlearner-resume-") as scratch:
        resumes = asyncio.run(
            disturbed(Path(scratch), options.steps, options.resumes, options.seed)
        )
        print(
            f"killed {options.resumes} times, resumed {resumes} times from a checkpoint", flush=True
        )
        found = undisturbed(Path(scratch), 0, options.steps)
    if found["first_difference"]:
        print(f"the first difference: {found['first_difference']}")
    same = [one["replay"] == one["run"] for one in found["digests"].values()]
    figures: dict[str, Any] = {"resumes": resumes, "steps": options.steps}
    figures |= {"identical_losses": found["identical_steps"] == options.steps}
    figures |= {"identical_digest": bool(same) and all(same)}
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
