"""Measure tickets per second through the whole path of a learner: ticket, group of 24 KiB, record,
ledger, step.

A real learner with a backend that computes nothing runs on one core; a real nats-server and a hub
that answers every ticket at once share the others.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import yaml

from bench.support import made_up_hub
from broker.contract import codec, wire
from broker.contract.streams import SAMPLES, TICKETS
from broker.jetstream.bus import Bus, Delivery
from broker.jetstream.ticket_results import ticket_key
from broker.server.private_server import BrokerServer

RUN: Final = "throughput"
STEPS: Final = 100
GROUPS: Final = 64  # of one step
EPISODES: Final = 8
TOKENS: Final = 290  # of one episode: 24 KiB for the group
AT_ONCE: Final = 64  # tickets that the hub holds
WARM_STEPS: Final = 10  # not counted
TINY: Final = {
    "hidden_size": 16,
    "num_layers": 1,
    "num_heads": 1,
    "num_kv_heads": 1,
    "head_dim": 16,
} | {"intermediate_size": 32}


def measure() -> dict[str, Any]:
    """Return ``tickets_per_s`` and the size of a group in KiB."""
    with tempfile.TemporaryDirectory() as folder:
        with BrokerServer(str(Path(folder) / "store")) as server:
            cores = sorted(os.sched_getaffinity(0))
            learner = _start_learner(Path(folder), server.url)
            os.sched_setaffinity(learner.pid, cores[:1])
            if len(cores) > 1:
                os.sched_setaffinity(0, cores[1:])
                os.sched_setaffinity(server.pid, cores[1:])
            try:
                group_kib = asyncio.run(_answer(server.url, learner))
            finally:
                learner.kill()
                learner.wait()
                os.sched_setaffinity(0, cores)
        rows = [
            json.loads(line)
            for line in (Path(folder) / RUN / "metrics.jsonl").read_text().splitlines()
        ]
    counted = rows[WARM_STEPS:]
    assert rows[-1]["ticket/trained"] == STEPS * GROUPS, rows[-1]
    seconds = counted[-1]["time"] - rows[WARM_STEPS - 1]["time"]
    return {
        "tickets_per_s": round(len(counted) * GROUPS / seconds, 1),
        "tickets_group_kib": round(group_kib, 1),
    }


def _start_learner(folder: Path, url: str) -> subprocess.Popen[bytes]:
    lake = {
        "env": "frozenlake",
        "group_size": EPISODES,
        "max_context_tokens": 512,
        "sampling": {"max_tokens": 256},
    }
    train = {
        "backend": f"{Path(__file__).with_name('null.py')}:NullBackend",
        "steps": STEPS,
        "num_threads": 1,
    }
    train |= {"groups_per_step": GROUPS, "max_staleness": 1, "micro_batch_tokens": 8192}
    config: dict[str, Any] = {
        "run": {"name": RUN, "dir": str(folder)},
        "model": {"path": None, "tiny": TINY},
    }
    config |= {"domains": {"lake": lake}, "train": train}
    config |= {"rollout": {"max_context_tokens": 512}, "trackers": {"use": []}}
    path = folder / "throughput.yaml"
    path.write_text(yaml.safe_dump(config))
    log = (folder / "learner.log").open("wb")
    command = [sys.executable, "-m", "rlearner.cli", "start", str(path), "--broker", url]
    return subprocess.Popen(command, stderr=log, stdout=log)


async def _answer(url: str, learner: subprocess.Popen[bytes]) -> float:
    """Answer tickets until the learner exits; return the KiB of one group on the wire."""
    bus = await Bus.connect(url, RUN, name="hub")
    await bus.ensure_streams()
    queue = await bus.work_queue(TICKETS, "lake")
    group = _group()
    working: set[asyncio.Task[None]] = set()
    try:
        while learner.poll() is None:
            for delivery in await queue.fetch(AT_ONCE - len(working), 0.5):
                working.add(task := asyncio.create_task(_end(bus, delivery, group)))
                task.add_done_callback(working.discard)
            while len(working) >= AT_ONCE:
                await asyncio.wait(working, return_when=asyncio.FIRST_COMPLETED)
        if learner.returncode:
            raise RuntimeError(f"the learner ended with exit code {learner.returncode}")
    finally:
        await bus.close()
    return len(codec.encode(group)) / 1024


async def _end(bus: Bus, delivery: Delivery, group: wire.Group) -> None:
    ticket = delivery.message
    assert isinstance(ticket, wire.Ticket)
    runs = wire.column([ticket.min_version, TOKENS // 2], "<i4")
    mine = msgspec.structs.replace(
        group,
        ticket=ticket.number,
        task_index=ticket.task_index,
        min_version=ticket.min_version,
        trajectories=[
            msgspec.structs.replace(one, version_runs=runs) for one in group.trajectories
        ],
    )
    await bus.publish(
        SAMPLES, mine, ticket=ticket.number, message_id=ticket_key(ticket.number, evaluation=False)
    )
    await delivery.ack()


def _group() -> wire.Group:
    ticket = wire.Ticket(
        number=1, domain="lake", task_index=0, seed=0, min_version=0, max_staleness=1, group_size=EPISODES,
        min_group_size=EPISODES, deadline_s=600.0,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    half = TOKENS // 2
    episodes = [
        made_up_hub.trajectory(
            i, rng.integers(6, 60, TOKENS).tolist(), [-1.0] * half, version=0, reward=float(i % 2)
        )
        for i in range(EPISODES)
    ]
    return made_up_hub.group(ticket, episodes)
