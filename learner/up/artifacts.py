"""What a run leaves for the eye: reward.png and a GIF of an episode before and after training."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSONL file; a half-written last line is left out."""
    lines = []
    for text in path.read_text().splitlines() if path.exists() else []:
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            break
    return lines


def draw_rewards(lines: list[dict[str, Any]], out: Path) -> bool:
    """Reward and success per step, with the evaluations on held-out tasks; False when there is nothing to draw."""
    if not lines:
        return False
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    steps = [line["step"] for line in lines]
    axes.plot(steps, [line.get("reward/mean", math.nan) for line in lines], color="tab:gray", alpha=0.7, label="reward, training")
    axes.plot(steps, [line.get("env/success_rate", math.nan) for line in lines], color="tab:blue", alpha=0.5, label="success, training")
    measured = [(line.get("eval/step", line["step"]), line["eval/success_rate"]) for line in lines if "eval/success_rate" in line]
    if measured:
        axes.plot(*zip(*measured, strict=True), "o-", color="tab:green", label="success, held-out tasks")
    baselines = {
        n.split("/")[1]: v
        for line in lines
        for n, v in line.items()
        if n.startswith("eval/") and n.count("/") == 2 and n.endswith("/success_rate")
    }
    for name, value in baselines.items():
        axes.axhline(value, linestyle="--", color="tab:red", label=f"success, {name} engine")
    axes.set_xlabel("optimizer step")
    axes.grid(alpha=0.3)
    axes.legend(loc="best")
    figure.tight_layout()
    figure.savefig(out, dpi=120)
    pyplot.close(figure)
    return True
