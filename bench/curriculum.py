"""Compare a curriculum with none on Sokoban: samples to the same success on held-out levels.

    python -m bench.curriculum [--seeds 3] [--every 10] [--out runs/curriculum] [key=value …]

Both arms of a seed start from the same warm start, with the settings of configs/curriculum.yaml;
the arm ``none`` plays new levels without end. The success to reach is the highest that both arms
have reached, by the measurements of every few steps; samples are all episodes that were played
until then, by interpolation between two measurements. A finished arm is one file in the output
folder and is not repeated. The last line is one JSON object: samples_ratio (of curriculum to none,
median of the seeds), and of each seed the success, the samples of both and their measurements.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from bench.learning.compare import MEASURED, WatchedArm, keep, kept, run_arm, warm_start
from broker.errors import UserError
from broker.settings.runspec import load, validate

CONFIG: Final = "configs/curriculum.yaml"
ARMS: Final[Mapping[str, tuple[str, ...]]] = {
    "none": ("domains.sokoban.curriculum=null",),
    "curriculum": (),
}
# A success that is hardly above the start is noise: of 256 levels it has a standard error of 0.03.
MIN_GAIN: Final = 0.05


class CurriculumArm(WatchedArm):
    """An arm that is also measured before its first step."""

    async def run(self) -> None:
        await self.measure()
        await super().run()


def samples_until(points: Sequence[tuple[float, float]], success: float) -> float:
    """Return the samples at which a curve first reaches a success, linear between its points.

    Args:
        points: (samples, success), by samples.
    """
    previous = points[0]
    for point in points:
        if point[1] >= success:
            rise = point[1] - previous[1]
            share = (success - previous[1]) / rise if rise > 0 else 1.0
            return previous[0] + share * (point[0] - previous[0])
        previous = point
    raise ValueError(f"the curve never reaches {success}")


def compare_arms(
    none: Sequence[tuple[float, float]], curriculum: Sequence[tuple[float, float]]
) -> dict[str, Any]:
    """Return the samples of both arms at the highest success that both have reached."""
    success = min(max(point[1] for point in points) for points in (none, curriculum))
    gain = success - max(none[0][1], curriculum[0][1])
    if gain < MIN_GAIN:
        return {"success": round(success, 4), "samples_ratio": None}
    samples = {
        "none": samples_until(none, success),
        "curriculum": samples_until(curriculum, success),
    }
    ratio = samples["curriculum"] / samples["none"]
    return {
        "success": round(success, 4),
        "samples": {name: round(value) for name, value in samples.items()},
        "samples_ratio": round(ratio, 3),
    }


def curve_of(result: Mapping[str, Any], group_size: int) -> list[tuple[float, float]]:
    """Return (samples, success) of each measurement of a stored arm."""
    return [
        (group_size * result["consumed"][step], success)
        for step, success in sorted(result["points"].items(), key=lambda item: int(item[0]))
    ]


def measure_seed(options: argparse.Namespace, seed: int, model: str) -> dict[str, Any]:
    """Run what is missing of a seed, and return its row."""
    curves: dict[str, list[tuple[float, float]]] = {}
    for name, own in ARMS.items():
        # The arm's own settings come last, so that no override brings the curriculum back.
        settings = [*MEASURED, f"run.seed={seed}", *options.overrides, *own]
        path = options.out.absolute() / f"{name}.seed{seed}.json"
        config = validate(load(CONFIG, [*settings, "run.name=arm"]))
        result = kept(path, settings)
        if result is None:
            result = keep(path, settings, run_arm(config, model, options.every, CurriculumArm))
        curves[name] = curve_of(result, config["domains"]["sokoban"]["group_size"])
        print(f"{name} seed {seed}: {curves[name]}", file=sys.stderr, flush=True)
    return {"seed": seed, **compare_arms(**curves), "points": curves}


def main() -> int:
    """Run missing arms; return 0 if a ratio was measured."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "python -m bench.curriculum", description=__doc__, formatter_class=raw
    )
    parser.add_argument("overrides", nargs="*", help="key=value, of the configuration")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--every", type=int, default=10, help="steps between two measurements")
    parser.add_argument("--out", type=Path, default=Path("runs/curriculum"))
    options = parser.parse_intermixed_args()
    import torch

    torch.set_num_threads(1)
    try:
        model = warm_start(options.out.absolute(), CONFIG, options.overrides)
        rows = [measure_seed(options, seed, model) for seed in range(options.seeds)]
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    ratios = [row["samples_ratio"] for row in rows if row["samples_ratio"] is not None]
    ratio = round(statistics.median(ratios), 3) if ratios else None
    print(json.dumps({"samples_ratio": ratio, "seeds": rows}))
    return 0 if ratios else 1


if __name__ == "__main__":
    sys.exit(main())
