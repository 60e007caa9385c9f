"""Measure what starting work per sample saves: ``python -m bench.per_sample``.

``record_s``: seconds from the end of a group's last episode to its record in the samples log, with
a reward that takes 0.5 s, the default two workers, and groups of 8 whose episodes end at different
times (lognormal, p99 / median 10, at most 6 s). A real broker, environment hub and reward hub;
groups of two domains take turns, one of which has its episodes scored early. ``finish_s``: seconds
from the arrival of a step's last group to the end of the step, for an algorithm with a critic on
the quickstart's model, about ten micro-batches a step, with scoring of groups as they arrive and
without, in turns. Medians; the last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from bench.support import made_up_hub
from bench.support.fleet import RunFleet
from bench.support.paired import median
from broker.channel import carriers
from broker.contract import wire
from broker.contract.streams import SAMPLES, TICKETS
from broker.jetstream.bus import Bus
from broker.runtime.announce import Announcer
from broker.settings import runspec
from rlearner_text.config import ModelSection, TinyModel
from rlearner_text.tiny import build_tiny

RUN: Final = "per-sample"
EARLY = "early"
TOGETHER = "together"
SIZE = 8
REWARD_S = 0.5
MEDIAN_S = 0.5
MOST_S = 6.0
SIGMA: Final = math.log(10) / 2.326  # p99 / median 10
LIMIT_S: Final = 120.0
REWARD: Final = f"import time\n\ndef slow(sample):\n    time.sleep({REWARD_S})\n    return 1.0\n"
GROUPS = 8
TOKENS = 96
ROWS = 8
MICRO_BATCH = 512


# -------------------------------------------------------------------------------------------------------
# rewards


class SkewedServer:
    """Answers each request after a lognormal time, the same for the same episode of both domains'
    n-th group.
    """

    def __init__(self, bus: Bus) -> None:
        self.channel = carriers.make_server("zmq", bus, "bench-server")
        self.announcer = Announcer(bus, self._presence, every_s=0.5)
        self.ended = 0.0  # when the last answer left

    async def start(self) -> None:
        await self.channel.start(self._answer, lambda _: None)
        await self.announcer.start()

    async def close(self) -> None:
        await self.announcer.close()
        await self.channel.close()

    async def _answer(self, request: wire.GenerateRequest) -> wire.GenerateReply:
        await asyncio.sleep(min(MEDIAN_S * math.exp(random.gauss(0, SIGMA)), MOST_S))
        self.ended = time.monotonic()
        return wire.GenerateReply(
            request_id=request.request_id,
            server="bench-server",
            token_ids=wire.column([7, 8], "<i4"),
            logprobs=wire.column([-1.0, -1.0], "<f4"),
            version_runs=wire.column([0, 2], "<i4"),
            finish_reason="length",
            policy_version=0,
        )

    def _presence(self) -> wire.Presence:
        return wire.Presence(
            role="rollout", id="bench-server", host="bench", pid=os.getpid(), state="serving", policy_version=0,
            address=self.channel.address, channel="zmq", policy=wire.ACTOR, epoch=1, slots=64,
        )  # fmt: skip


def _config(folder: Path) -> dict[str, Any]:
    (folder / "slow.py").write_text(REWARD)
    lake: dict[str, Any] = {
        "env": "frozenlake",
        "max_turns": 1,
        "group_size": SIZE,
        "sampling": {"max_tokens": 2},
    }
    lake |= {"rewards": [{"name": f"{folder / 'slow.py'}:slow"}]}
    domains = {EARLY: lake, TOGETHER: lake | {"score_ahead": False}}
    made: dict[str, Any] = {
        "run": {"name": RUN, "dir": str(folder / "runs")},
        "trackers": {"use": []},
    }
    return runspec.validate(made | {"model": {"path": None}, "domains": domains})


async def record_s(folder: Path, groups: int) -> dict[str, list[float]]:
    """Return the seconds from the last episode to the record, of each group of both domains."""
    model = build_tiny(folder / "model", TinyModel())
    took: dict[str, list[float]] = {EARLY: [], TOGETHER: []}
    async with RunFleet(folder, RUN) as fleet:
        bus = await Bus.connect(fleet.url, RUN, name="bench", deadline_s=30)
        server = SkewedServer(bus)
        try:
            await bus.ensure_streams()
            spec = wire.RunSpec(
                run=RUN,
                wire_version=wire.WIRE_VERSION,
                epoch=1,
                config=_config(folder),
                model_path=str(model),
            )
            await runspec.publish_runspec(bus, spec)
            for role in ("envhub", "rewardhub"):
                fleet.add(role, role)
            await server.start()
            records = bus.read_log(SAMPLES, 1)
            for number in range(1, 2 * (groups + 1) + 1):
                domain = EARLY if number % 2 else TOGETHER
                ticket = wire.Ticket(
                    number, domain, number // 2, number // 2, 0, 1, SIZE, SIZE, LIMIT_S
                )
                await bus.publish(TICKETS, ticket, key=domain, ticket=number)
                async with asyncio.timeout(LIMIT_S):
                    record = await anext(records)
                if not isinstance(record.message, wire.Group):
                    raise RuntimeError(f"ticket {number}: {record.message or record.error}")
                if number > 2:  # the first of each waits for workers to start
                    took[domain].append(time.monotonic() - server.ended)
            await records.aclose()
        finally:
            await server.close()
            await bus.close()
    return took


# -------------------------------------------------------------------------------------------------------
# learner


def _step(rng: np.random.Generator, first: int) -> list[wire.Group]:
    """Return the groups of one step, of sequences of different lengths."""

    def episode(number: int) -> wire.Trajectory:
        sampled = int(rng.integers(TOKENS // 4, TOKENS))
        tokens = rng.integers(6, 60, 16 + sampled).tolist()
        return made_up_hub.trajectory(
            number, tokens, [-2.0] * sampled, version=0, reward=float(rng.integers(0, 2))
        )

    tickets = [
        wire.Ticket(first + i, "lake", i, i, 0, 1, ROWS, ROWS, LIMIT_S) for i in range(GROUPS)
    ]
    return [
        made_up_hub.group(ticket, [episode(number) for number in range(ROWS)]) for ticket in tickets
    ]


async def finish_s(folder: Path, steps: int) -> dict[str, list[float]]:
    """Return the seconds from a step's last group to its end, with scoring as groups arrive and
    without.
    """
    from broker.settings.registry import resolve
    from learner.algorithm.advantages import ADVANTAGES
    from learner.backends.torch import TorchBackend
    from learner.config import AlgorithmSection, TrainSection
    from learner.training import TrainingThread

    path = str(build_tiny(folder / "model", TinyModel()))
    algorithm = AlgorithmSection.model_validate(
        {"adv_estimator": "gae", "critic": {"enabled": True}}
    )
    train = TrainSection(device="cpu", num_threads=1, micro_batch_tokens=MICRO_BATCH)
    estimator = resolve("advantages", "gae", ADVANTAGES)
    took = dict[str, list[float]]()
    threads = {}
    for name in (EARLY, TOGETHER):

        def build() -> TorchBackend:
            return TorchBackend(
                path, train=train, algorithm=algorithm, model=ModelSection(), seed=0
            )

        threads[name] = TrainingThread(build, estimator, algorithm, stream=name == EARLY)
        await threads[name].open()
        took[name] = []
    for step in range(steps + 1):
        groups = _step(np.random.default_rng(step), 1 + step * GROUPS)
        for name, training in threads.items():
            for group in groups[:-1]:
                training.add(group)
            await training.call(lambda: None)  # all but the last have arrived long ago
            began = time.monotonic()
            training.add(groups[-1])
            await training.finish(step)
            if step:  # the first allocates
                took[name].append(time.monotonic() - began)
    for training in threads.values():
        training.close()
    return took


def _figures(name: str, took: Mapping[str, list[float]]) -> dict[str, Any]:
    early = median(took[EARLY])
    together = median(took[TOGETHER])
    found = {f"{name}_early": round(early, 3), f"{name}_together": round(together, 3)}
    return found | {f"{name}_ratio": round(early / together, 3), f"{name}_pairs": len(took[EARLY])}


def main() -> int:
    """Measure both."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.per_sample", description="Measure work per sample."
    )
    parser.add_argument("--groups", type=int, default=12, help="of each domain (%(default)s)")
    parser.add_argument("--steps", type=int, default=8, help="of each learner (%(default)s)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rlearner-per-sample-") as folder:
        figures = _figures("record_s", asyncio.run(record_s(Path(folder), options.groups)))
        print(json.dumps(figures), flush=True)
        figures |= _figures("finish_s", asyncio.run(finish_s(Path(folder), options.steps)))
    print(json.dumps(figures | {"load": round(os.getloadavg()[0], 1)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
