"""Measure effective training time while processes are killed: ``python -m bench.faults [--kills
5]``.

One run: a step takes 3 s, a turn of generation about 1 s, both simulated
(``bench/support/simulated.py``); two rollout servers, two environment hubs, two reward hubs, a
learner and a broker, all real processes. An undisturbed phase gives the time of a step. Then every
10 step times a process is killed (SIGKILL) and restarted at once, as by systemd: first each role
but the learner, then every other kill the learner. Effective training time is the undisturbed time
of the steps trained, divided by the time that passed, from the first kill to 10 step times after
the last. ``--recoveries N`` measures only recoveries: from the kill until every ticket then in
flight has its record in the log; for the learner, until it has completed a new step.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import cycle
from pathlib import Path
from typing import Any, Final

from bench.support.fleet import RunFleet, RunProcess, run_audit
from bench.support.watch import FleetWatch
from broker.jetstream.bus import Bus
from broker.settings.runspec import validate
from learner.prepare import to_yaml

RUN: Final = "faults"
EVERY: Final = 10  # step times between two kills
BASE_STEPS: Final = 12
LIMIT_S: Final = 180.0
HERE: Final = Path(__file__).parent
REWARD: Final = "def length(sample):\n    return min(1.0, len(sample.response) / 8)\n"
TINY: Final = {
    "hidden_size": 16,
    "num_layers": 1,
    "num_heads": 1,
    "num_kv_heads": 1,
    "head_dim": 16,
} | {"intermediate_size": 32}


def config(folder: Path) -> dict[str, Any]:
    """Return the configuration of a run that is stopped before its last step."""
    questions = (f'{{"question": "{n}+{n}=", "answer": "{2 * n}"}}\n' for n in range(200))
    (folder / "sums.jsonl").write_text("".join(questions))
    (folder / "length_reward.py").write_text(REWARD)
    sums: dict[str, Any] = {
        "env": "qa",
        "env_args": {"path": str(folder / "sums.jsonl")},
        "group_size": 4,
    }
    sums |= {"max_context_tokens": 64, "deadline_s": 90, "sampling": {"max_tokens": 8}}
    sums |= {"rewards": [{"name": f"{folder / 'length_reward.py'}:length"}]}
    simulated = HERE / "support" / "simulated.py"
    train: dict[str, Any] = {
        "steps": 100_000,
        "groups_per_step": 8,
        "max_staleness": 1,
        "micro_batch_tokens": 512,
    }
    train |= {"num_threads": 1, "backend": f"{simulated}:SlowBackend"}
    config: dict[str, Any] = {"run": {"name": RUN, "dir": str(folder / "runs"), "seed": 5}}
    config |= {"model": {"path": None, "tiny": TINY}, "domains": {"sums": sums}, "train": train}
    config |= {"checkpoint": {"every_steps": 1}, "trackers": {"use": []}}
    config |= {
        "rollout": {"engine": f"{simulated}:SlowEngine", "max_context_tokens": 64, "num_threads": 1}
    }
    return validate(config | {"envhub": {"n": 64}, "rewardhub": {"workers": 1}})


async def hit(
    fleet: RunFleet, watch: FleetWatch, role: str, rng: random.Random, found: dict[str, list[float]]
) -> None:
    """Kill one process of a role and record how long the work in flight took to arrive."""
    victim: RunProcess | None = None if role == "broker" else rng.choice(fleet.of(role))

    async def strike() -> None:
        if victim is None:
            await fleet.restart_broker()
        else:
            victim.kill()

    took = await watch.recovery_s(role, strike, LIMIT_S)
    found[role].append(took)
    print(f"step {watch.step()}: {role} killed, recovered after {took:.1f} s", flush=True)


async def phase(
    fleet: RunFleet,
    watch: FleetWatch,
    victims: Sequence[str],
    step_s: float,
    rng: random.Random,
    found: dict[str, list[float]],
) -> float:
    """Kill processes one after the other; return the effective share of the time."""
    before = watch.step()
    await watch.until(lambda: watch.step() > before, LIMIT_S)  # begin where a step begins
    began = time.monotonic()
    first = watch.step()
    waiting: list[asyncio.Task[None]] = []

    for role in victims:
        next_kill = asyncio.create_task(asyncio.sleep(EVERY * step_s))
        waiting.append(asyncio.create_task(hit(fleet, watch, role, rng, found)))
        await next_kill
    await asyncio.gather(*waiting)
    last = watch.step()
    await watch.until(lambda: watch.step() > last, LIMIT_S)
    return (watch.step() - first) * step_s / (time.monotonic() - began)


@asynccontextmanager
async def running(folder: Path) -> AsyncIterator[tuple[RunFleet, FleetWatch, dict[str, Any]]]:
    """Yield a training fleet; fill the figures of the audit in when it has stopped."""
    file = folder / "run.yaml"
    file.write_text(to_yaml(config(folder)), encoding="utf-8")
    figures: dict[str, Any] = {}
    async with RunFleet(folder / "fleet", RUN) as fleet:
        bus = await Bus.connect(fleet.url, RUN, name="watch", deadline_s=20)
        await bus.ensure_streams()
        watch = FleetWatch(bus, folder / "runs" / RUN)
        watching = asyncio.create_task(watch.serve())
        learner = fleet.add("learner", "learner", "start", str(file))
        for number in range(2):
            fleet.add("rollout", f"rollout-{number}", "--gpus", "cpu")
            fleet.add("envhub", f"envhub-{number}")
            fleet.add("rewardhub", f"rewardhub-{number}")
        await watch.until(lambda: watch.step() >= 3, LIMIT_S)
        yield fleet, watch, figures
        os.kill(learner.pid, signal.SIGTERM)
        await fleet.wait_done([learner])
        audited = await asyncio.to_thread(run_audit, watch.folder, fleet.url)
        figures |= {"lost": audited["lost"], "trained_twice": audited["trained_twice"]}
        figures |= {"problems": audited["problems"] + fleet.crashes}
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await bus.close()


async def run(folder: Path, kills: int, with_learner: int, seed: int) -> dict[str, Any]:
    rng = random.Random(seed)
    found = defaultdict[str, list[float]](list)
    async with running(folder) as (fleet, watch, figures):
        began = time.monotonic()
        first = watch.step()
        await watch.until(lambda: watch.step() >= first + BASE_STEPS, LIMIT_S)
        step_s = (time.monotonic() - began) / BASE_STEPS
        print(f"undisturbed: {step_s:.2f} s a step", flush=True)
        others = _each(["envhub", "rollout", "rewardhub", "broker"], rng)
        share = await phase(fleet, watch, [next(others) for _ in range(kills)], step_s, rng, found)
        print(f"without learner kills: {share:.3f}", flush=True)
        mixed = ["learner" if i % 2 == 0 else next(others) for i in range(with_learner)]
        share_with = await phase(fleet, watch, mixed, step_s, rng, found)
        print(f"with learner kills: {share_with:.3f}", flush=True)
    shares = {
        "effective_training_time": round(share, 3),
        "effective_training_time_with_learner": round(share_with, 3),
    }
    return shares | {"undisturbed_step_s": round(step_s, 2)} | _summary(found) | figures


async def recoveries(folder: Path, kills: int, seed: int) -> dict[str, Any]:
    """Kill each role this often, each time after the previous one has recovered, with short steps."""
    rng = random.Random(seed)
    found = defaultdict[str, list[float]](list)
    async with running(folder) as (fleet, watch, figures):
        roles = ("envhub", "rollout", "rewardhub", "broker", "learner")
        for role in [role for _ in range(kills) for role in rng.sample(roles, 5)]:
            await hit(fleet, watch, role, rng, found)
            settled = watch.step() + 2
            await watch.until(
                lambda settled=settled: (
                    watch.step() >= settled and all(c.running for c in fleet.children)
                ),  # type: ignore[misc]
                LIMIT_S,
            )
            await asyncio.sleep(rng.random() * 2)
    return _summary(found) | figures


def _summary(found: Mapping[str, list[float]]) -> dict[str, Any]:
    figures: dict[str, Any] = {"kills": sum(map(len, found.values()))}
    figures |= {"kills_by_role": {role: len(times) for role, times in sorted(found.items())}}
    figures |= {
        "recovery_p95_s": {role: round(_p95(times), 1) for role, times in sorted(found.items())}
    }
    return figures | {
        "recovery_max_s": {role: round(max(times), 1) for role, times in sorted(found.items())}
    }


def _each(roles: list[str], rng: random.Random) -> Iterator[str]:
    """Yield every kind in turn, in random order."""
    return cycle(rng.sample(roles, len(roles)))


def _p95(values: list[float]) -> float:
    return (
        values[0]
        if len(values) == 1
        else statistics.quantiles(values, n=20, method="inclusive")[-1]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--kills-with-learner", type=int, default=5)
    text = "only measure recoveries, N of each role with short steps"
    parser.add_argument("--recoveries", type=int, default=0, metavar="N", help=text)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.recoveries:
        os.environ |= {"RL_SIMULATED_STEP_S": "0.3", "RL_SIMULATED_TURN_S": "1"}
    with tempfile.TemporaryDirectory(prefix="rlearner-faults-") as scratch:
        if options.recoveries:
            work = recoveries(Path(scratch), options.recoveries, options.seed)
        else:
            work = run(Path(scratch), options.kills, options.kills_with_learner, options.seed)
        print(json.dumps(asyncio.run(work)))


if __name__ == "__main__":
    main()
