"""Measure how well the stages of a run overlap: ``python -m bench.overlap [--seconds 2]``.

A broker, a learner, a rollout server, an environment hub and a reward hub, all real processes,
train a tiny model. Its generation of the samples of one step takes Tg and its training on them Tt
(``bench/support/paced.py`` sleeps so long); everything else is the run's own work: tickets,
episodes, rewards, records, the ledger, weights. With staleness 1 the ideal time of a step is
max(Tg, Tt), and ``overlap`` is the share of it: max(Tg, Tt) / T_step, where T_step is the mean over
the counted steps. The last line is one JSON object: rows of {ratio, overlap, step_s, …} with the
learner's own figures of the same steps.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from bench.support.fleet import RunFleet
from broker.settings.arguments import count, positive
from broker.settings.runspec import validate
from learner.prepare import to_yaml

RUN: Final = "overlap"
# Tg and Tt, in units of the longer one
RATIOS: Final = {"1:2": (0.5, 1.0), "1:1": (1.0, 1.0), "2:1": (1.0, 0.5)}
GROUPS = 8
EPISODES = 8
SLOTS = 32
WARM_STEPS = 4
STEPS = 20
LIMIT_S: Final = 240.0
HERE: Final = Path(__file__).parent
TINY: Final = {
    "hidden_size": 16,
    "num_layers": 1,
    "num_heads": 1,
    "num_kv_heads": 1,
    "head_dim": 16,
} | {"intermediate_size": 32}


def config(folder: Path, steps: int) -> dict[str, Any]:
    """Return the configuration of a run."""
    paced = HERE / "support" / "paced.py"
    lake: dict[str, Any] = {
        "env": "frozenlake",
        "max_turns": 1,
        "group_size": EPISODES,
        "max_context_tokens": 256,
    }
    lake |= {
        "sampling": {"max_tokens": 8},
        "rewards": [{"name": "format", "args": {"pattern": "[LRUD]"}}],
    }
    train: dict[str, Any] = {
        "steps": steps,
        "groups_per_step": GROUPS,
        "max_staleness": 1,
        "micro_batch_tokens": 512,
    }
    train |= {"num_threads": 1, "backend": f"{paced}:PacedBackend"}
    made: dict[str, Any] = {
        "run": {"name": RUN, "dir": str(folder / "runs")},
        "trackers": {"use": []},
    }
    made |= {"model": {"path": None, "tiny": TINY}, "domains": {"lake": lake}, "train": train}
    made |= {
        "rollout": {"engine": f"{paced}:PacedEngine", "max_context_tokens": 256, "num_threads": 1}
    }
    return validate(made | {"envhub": {"n": 2 * GROUPS * EPISODES}, "rewardhub": {"workers": 1}})


async def row(folder: Path, ratio: str, longer_s: float, steps: int) -> dict[str, Any]:
    """Run one ratio; return its figures."""
    generate_s, train_s = (longer_s * share for share in RATIOS[ratio])
    given = {"RL_PACED_GENERATE_S": generate_s, "RL_PACED_TRAIN_S": train_s}
    given |= {"RL_PACED_SAMPLES": GROUPS * EPISODES, "RL_PACED_SLOTS": SLOTS}
    os.environ.update({name: str(value) for name, value in given.items()})
    (folder / "overlap.yaml").write_text(to_yaml(config(folder, WARM_STEPS + steps)))
    async with RunFleet(folder, RUN) as fleet:
        learner = fleet.add("learner", "learner", "start", str(folder / "overlap.yaml"))
        for role in ("rollout", "envhub", "rewardhub"):
            fleet.add(role, role)
        await fleet.wait_done([learner], LIMIT_S)
        if fleet.crashes:
            raise RuntimeError("\n".join(fleet.crashes))
    lines = (folder / "runs" / RUN / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    counted = rows[WARM_STEPS:]
    step_s = (counted[-1]["time"] - rows[WARM_STEPS - 1]["time"]) / len(counted)
    mean = {name: sum(one.get(name, 0.0) for one in counted) / len(counted) for name in SHOWN}
    figures: dict[str, Any] = {
        "ratio": ratio,
        "overlap": round(longer_s / step_s, 4),
        "step_s": round(step_s, 4),
    }
    figures |= {"generate_s": generate_s, "train_s": train_s, "steps": len(counted)}
    return (
        figures
        | {name: round(value, 4) for name, value in mean.items()}
        | {"load": round(os.getloadavg()[0], 1)}
    )


SHOWN: Final = ("time/wait_for_batch", "time/train", "time/offer_weights", "trainer/idle_ratio")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure every ratio."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.overlap", description="Measure how well stages overlap."
    )
    parser.add_argument(
        "--seconds", type=positive, default=2.0, help="of the longer stage (%(default)s)"
    )
    parser.add_argument(
        "--steps", type=count, default=STEPS, help="counted steps of each ratio (%(default)s)"
    )
    parser.add_argument(
        "--ratios", nargs="+", choices=sorted(RATIOS), default=list(RATIOS), help="Tg:Tt (all)"
    )
    options = parser.parse_args(argv)
    began = time.monotonic()
    rows = []
    for ratio in options.ratios:
        with tempfile.TemporaryDirectory(prefix="rlearner-overlap-") as folder:
            rows.append(asyncio.run(row(Path(folder), ratio, options.seconds, options.steps)))
        print(json.dumps(rows[-1]), flush=True)
    print(json.dumps({"rows": rows, "seconds": round(time.monotonic() - began, 1)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
