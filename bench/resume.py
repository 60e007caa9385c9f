"""Whether a learner that was killed and resumed trains to the very same bits: ``python -m bench.resume [--steps 50] [--resumes 5]``.

A learner trains a small model on made-up groups and is killed (SIGKILL) at random moments; each time it is started again and
resumes. Then the records that the broker's log held are put, byte for byte and in their order, into a second broker, and a learner of the
same configuration trains on them undisturbed. All numbers of the loss and the gradient in metrics.jsonl, and every tensor of the
last checkpoint (weights, optimizer, schedule, RNG), must be the same.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import random
import tempfile
import time
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any, Final

import numpy as np

from bench.fleet import Fleet
from broker import wire
from broker.jetstream import Bus
from broker.runspec import validate
from broker.streams import SAMPLES, TICKETS
from learner import checkpoint
from learner.metrics import read_lines
from learner.prepare import to_yaml

RUN: Final = "resume"
TINY: Final = {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "num_kv_heads": 2, "head_dim": 16, "intermediate_size": 64}
PROMPT, RESPONSE = 12, 20
NUMBERS: Final = ("actor/", "critic/", "rollout_corr/", "reward/", "staleness/")  # what training computes; times differ
LIMIT_S: Final = 120.0


def config(folder: Path, steps: int, every: int) -> dict[str, Any]:
    """One domain whose environment is never run."""
    lake = {"env": "frozenlake", "group_size": 4, "max_context_tokens": 64, "deadline_s": 60, "sampling": {"max_tokens": 32}}
    return validate(
        {
            "run": {"name": RUN, "dir": str(folder), "seed": 11},
            "model": {"path": None, "tiny": TINY},
            "domains": {"lake": lake},
            "train": {"steps": steps, "groups_per_step": 4, "micro_batch_tokens": 256, "lr": 1e-3, "num_threads": 1},
            "algorithm": {"entropy_coef": 0.001},
            "rollout": {"max_context_tokens": 64},
            "checkpoint": {"every_steps": every},
            "samples": {"keep": True},
            "trackers": {"use": []},
        }
    )


def group(ticket: wire.Ticket, rng: random.Random) -> wire.Group:
    """Random tokens with random rewards: what matters here is only that they are the same twice."""
    numbers = np.random.default_rng([ticket.number, rng.randrange(1 << 30)])
    num_tokens = PROMPT + RESPONSE
    trajectories = []
    for episode in range(4):
        reward = float(numbers.random())
        trajectories.append(
            wire.Trajectory(
                episode=episode,
                token_ids=wire.column(numbers.integers(6, 60, num_tokens), "<i4"),
                loss_mask=wire.column([0] * PROMPT + [1] * RESPONSE, "|u1"),
                logprobs=wire.column([0.0] * PROMPT + (-3 - numbers.random(RESPONSE)).tolist(), "<f4"),
                version_runs=wire.column([ticket.min_version, RESPONSE], "<i4"),
                turns=[wire.Turn(start=PROMPT, end=num_tokens, reward=reward, valid=True, finish_reason="length", server="bench")],
                reward=reward,
                reward_parts={"env": reward},
                success=reward > 0.5,
                end="terminated",
            )
        )
    return wire.Group(
        ticket=ticket.number,
        domain=ticket.domain,
        task_index=ticket.task_index,
        min_version=ticket.min_version,
        hub="bench",
        deliveries=1,
        pools=[],
        trajectories=trajectories,
    )


async def answer(bus: Bus, seed: int, pace_s: float) -> None:
    """Take tickets and store their groups, in an order that the clock decides, until cancelled."""
    rng, queue = random.Random(seed), await bus.work_queue(TICKETS, "lake")
    while True:
        deliveries = await queue.fetch(4, 5.0)
        rng.shuffle(deliveries)
        for delivery in deliveries:
            assert isinstance(delivery.message, wire.Ticket)
            await asyncio.sleep(rng.random() * pace_s)
            await bus.publish(SAMPLES, group(delivery.message, rng), ticket=delivery.message.number)
            await delivery.ack()


async def disturbed(folder: Path, steps: int, resumes: int, seed: int) -> tuple[list[bytes], int]:
    """Train with kills; the records of the log, in order, and how often the learner resumed from a checkpoint."""
    rng = random.Random(seed)
    file = folder / "run.yaml"
    file.write_text(to_yaml(config(folder / "runs", steps, 3)), encoding="utf-8")
    moments = sorted(rng.sample(range(4, steps - 1), resumes))
    metrics = folder / "runs" / RUN / "metrics.jsonl"
    records: list[bytes] = []
    async with Fleet(folder / "fleet", RUN) as fleet:
        bus = await Bus.connect(fleet.url, RUN, name="bench", deadline_s=20)
        await bus.ensure_streams()

        async def keep() -> None:
            async with aclosing(bus.read_log(SAMPLES, 1)) as log:
                async for record in log:
                    records.append(record.data)

        work = [asyncio.create_task(keep()), asyncio.create_task(answer(bus, seed, 0.05))]
        learner = fleet.add("learner", "learner", "start", str(file))
        for lives, moment in enumerate(moments, start=1):
            await _until(lambda lives=lives: learner.log.read_text().count(" training\n") >= lives)  # type: ignore[misc]
            await _until(lambda moment=moment: bool(lines := read_lines(metrics)) and lines[-1]["step"] >= moment)  # type: ignore[misc]
            await asyncio.sleep(rng.random() * 0.3)
            learner.kill()
        await fleet.wait_done([learner], LIMIT_S)
        last = await bus.last_seq(SAMPLES)
        await _until(lambda: len(records) >= last)
        for task in work:
            task.cancel()
        await asyncio.gather(*work, return_exceptions=True)
        await bus.close()
        if fleet.crashes:
            raise RuntimeError("\n".join(fleet.crashes))
    return records, (folder / "fleet" / "learner.log").read_text().count("resuming from")


async def undisturbed(folder: Path, steps: int, records: list[bytes]) -> None:
    """Train once on the same records."""
    file = folder / "run.yaml"
    file.write_text(to_yaml(config(folder / "runs", steps, 0)), encoding="utf-8")
    async with Fleet(folder / "fleet", RUN) as fleet:
        bus = await Bus.connect(fleet.url, RUN, name="bench", deadline_s=20)
        await bus.ensure_streams()
        for data in records:
            message = wire.decode(data, wire.Group)
            await bus.publish(SAMPLES, message, ticket=message.ticket)
        if await bus.last_seq(SAMPLES) != len(records):
            raise RuntimeError(f"{len(records)} records became {await bus.last_seq(SAMPLES)}")
        learner = fleet.add("learner", "learner", "start", str(file))
        await fleet.wait_done([learner], LIMIT_S)
        await bus.close()
        if fleet.crashes:
            raise RuntimeError("\n".join(fleet.crashes))


async def _until(what: Callable[[], bool]) -> None:
    """Look until it holds."""
    began = time.monotonic()
    while not what():
        if time.monotonic() - began > LIMIT_S:
            raise TimeoutError("the learner does not get on")
        await asyncio.sleep(0.02)


def losses(folder: Path) -> list[dict[str, float]]:
    """By step, every number that training computed."""
    lines = read_lines(folder / "metrics.jsonl")
    return [{"step": line["step"]} | {name: value for name, value in line.items() if name.startswith(NUMBERS)} for line in lines]


def digest(folder: Path) -> str:
    """Of every tensor in the newest checkpoint."""
    found = checkpoint.newest(folder / "checkpoints")
    if found is None:
        raise FileNotFoundError(f"{folder}: no checkpoint")
    whole = hashlib.sha256()
    for file in (found.path / "model.safetensors", found.path / "learner" / "state.safetensors"):
        whole.update(file.read_bytes())
    return whole.hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--resumes", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rlearner-resume-") as scratch:
        one, two = Path(scratch) / "killed", Path(scratch) / "undisturbed"
        for folder in (one, two):
            folder.mkdir()
        records, resumes = asyncio.run(disturbed(one, options.steps, options.resumes, options.seed))
        print(f"killed {options.resumes} times, resumed {resumes} times from a checkpoint, {len(records)} records in the log", flush=True)
        asyncio.run(undisturbed(two, options.steps, records))
        first, second = losses(one / "runs" / RUN), losses(two / "runs" / RUN)
        digests = digest(one / "runs" / RUN), digest(two / "runs" / RUN)
    same = sum(1 for a, b in zip(first, second, strict=False) if a == b)
    print(f"steps with the same numbers: {same} of {options.steps}; digests {digests[0]} and {digests[1]}")
    figures = {
        "resumes": resumes,
        "steps": options.steps,
        "identical_losses": same == options.steps == len(first) == len(second),
        "identical_digest": digests[0] == digests[1],
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
