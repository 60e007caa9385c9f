"""Compare algorithms on one configuration: same warm start, equal samples, same held-out tasks, in
one process.

    python -m bench.learning.compare configs/sokoban.yaml --algorithms grpo,gigpo [--seeds 3] [--every 10] [--out
    FOLDER] [key=value …]

Each arm is one algorithm with one seed, on one core; it is evaluated every few steps and at its
end. A finished arm is one file in the output folder and is not repeated while its settings are the
same. The presets replace the configuration's algorithm; ``key=value`` is applied after them. If one
of the algorithms would have prompts of one turn each, set ``domains.<name>.context`` so that all
have the same. The last line is one JSON object: start, and for each algorithm its seeds, end, 95 %
interval, points and core-seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.learning.arm import TrainingArm, measure
from bench.learning.figures import interval, rate
from broker.errors import ConfigError, UserError
from broker.settings.run_settings import RunSettings
from broker.settings.runspec import load, validate
from broker.system.private_files import private_write

MEASURED = ("train.num_threads=1", "rollout.num_threads=1", "eval.temperature=1.0")


class WatchedArm(TrainingArm):
    """An arm measured while it trains; ``points``: step -> solved episodes of each held-out task."""

    def __init__(self, config: dict[str, Any], model_path: str, every: int) -> None:
        super().__init__(config, model_path)
        self._every, self.points = every, dict[int, list[int]]()
        self.consumed: dict[int, int] = {}  # step -> groups that have ended

    async def measure(self) -> None:
        self.points[self.hub.version] = await self.success()
        counts = self.ledger.counts()
        self.consumed[self.hub.version] = counts["issued"] - counts["open"]

    async def _step(self) -> None:
        await super()._step()
        if self._every and self.hub.version % self._every == 0 and not self.ledger.done:
            await self.measure()


def check_contexts(configs: Sequence[dict[str, Any]]) -> None:
    """Raise ConfigError if some arms see whole conversations and others one turn: they share a warm
    start.
    """
    from broker.settings.config import takes_steps

    estimators = [config["algorithm"]["adv_estimator"] for config in configs]
    for name, domain in configs[0]["domains"].items():
        if len({takes_steps(domain["context"], estimator) for estimator in estimators}) > 1:
            allowed = "steps, so that all start from the same model"
            raise ConfigError(f"domains.{name}.context", domain["context"], allowed)


def warm_start(folder: Path, config_path: str, overrides: Sequence[str]) -> str:
    """Make the weights that all arms start from."""
    from learner.prepare import write_config
    from learner.warm_start import ModelPreparation

    config = validate(
        load(config_path, [*MEASURED, *overrides, "run.name=warm", f"run.dir={folder}"])
    )
    write_config(folder / "warm", config)
    return ModelPreparation(
        RunSettings.of_config(config),
        (folder / "warm").absolute(),
        lambda text: print(text, file=sys.stderr, flush=True),
    ).model_path()


def run_arm(
    config: dict[str, Any], model_path: str, every: int, kind: type[WatchedArm] = WatchedArm
) -> dict[str, Any]:
    began = time.monotonic()
    cpu = time.process_time()
    arm = kind(config, model_path, every)

    async def work() -> None:
        await arm.run()
        await arm.measure()

    asyncio.run(work())
    tasks = arm.points[arm.hub.version]
    episodes = config["eval"]["group_size"]
    points = {
        str(step): sum(solved) / len(solved) / episodes for step, solved in arm.points.items()
    }
    row: dict[str, Any] = {"solved": tasks, "episodes_per_map": episodes, "points": points}
    row |= {"curve": [round(value, 4) for value in arm.curve], "tickets": arm.ledger.counts()}
    row |= {"consumed": {str(step): number for step, number in arm.consumed.items()}}
    return row | {
        "seconds": round(time.monotonic() - began, 1),
        "cpu_s": round(time.process_time() - cpu, 1),
    }


def report(start: dict[str, Any], found: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Return the start, and the seeds, mean and interval of each algorithm."""
    rng = np.random.default_rng(0)
    rows: dict[str, Any] = {"start": round(rate(start), 4)}
    for name, results in found.items():
        low, high = interval(results, rng)
        points = {step: [one["points"][step] for one in results] for step in results[0]["points"]}
        rates = [rate(one) for one in results]
        rows[name] = {
            "seeds": [round(one, 4) for one in rates],
            "end": round(float(np.mean(rates)), 4),
        }
        rows[name]["interval"] = [round(low, 4), round(high, 4)]
        rows[name]["points"] = {step: round(float(np.mean(one)), 4) for step, one in points.items()}
        rows[name]["cpu_s"] = round(float(np.mean([one["cpu_s"] for one in results])), 1)
    return rows


def kept(path: Path, settings: list[str]) -> dict[str, Any] | None:
    """Return the stored result of exactly these settings."""
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if found.get("settings") == settings else None


def keep(path: Path, settings: list[str], found: dict[str, Any]) -> dict[str, Any]:
    """Write a result atomically."""
    private_write(path, (json.dumps({"settings": settings, **found}) + "\n").encode())
    return found


def compare(options: argparse.Namespace) -> dict[str, Any]:
    import torch

    torch.set_num_threads(1)
    folder: Path = options.out.absolute()
    names: list[str] = options.algorithms.split(",")
    overrides = {seed: [*MEASURED, f"run.seed={seed}"] for seed in range(options.seeds)}
    arms = [
        (s, n, [*o, f"algorithm={n}", *options.overrides])
        for s, o in overrides.items()
        for n in names
    ]
    configs = [
        validate(load(options.config, [*settings, "run.name=arm"])) for _, _, settings in arms
    ]
    check_contexts(configs)
    model = warm_start(folder, options.config, options.overrides)
    first = [*MEASURED, *options.overrides, "eval.group_size=4"]
    start = kept(folder / "start.json", first)
    start = start or keep(
        folder / "start.json",
        first,
        measure(validate(load(options.config, [*first, "run.name=arm"])), model),
    )
    print(f"start {rate(start):.4f}", file=sys.stderr, flush=True)
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for (seed, name, settings), config in zip(arms, configs, strict=True):
        path = folder / f"{name}.seed{seed}.json"
        result = kept(path, settings) or keep(path, settings, run_arm(config, model, options.every))
        found[name].append(result)
        print(
            f"{name} seed {seed}: {result['points']} in {result['seconds']:.0f} s",
            file=sys.stderr,
            flush=True,
        )
    return report(start, found)


def main() -> int:
    """Run missing arms; return 0 if every arm has a result."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "python -m bench.learning.compare", description=__doc__, formatter_class=raw
    )
    add = parser.add_argument
    add("config", help="configuration with a warm start")
    add("overrides", nargs="*", help="key=value, of the configuration")
    add("--algorithms", default="grpo,gigpo", help="presets, with commas between")
    add("--seeds", type=int, default=3)
    add("--every", type=int, default=0, help="steps between two measurements; 0: at the end only")
    add("--out", type=Path, default=Path("runs/compare"), help="where results are kept")
    try:
        print(json.dumps(compare(parser.parse_intermixed_args())))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
