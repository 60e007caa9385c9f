"""``rlearner draw``: draws the pictures that ``rlearner up`` draws at its end, for any run."""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path
from typing import Any

from broker.errors import UserError
from broker.system.visible_text import visible_json
from learner.reporting.metrics import read_lines
from learner.reporting.showcase import render
from learner.run_folder import find_run

Row = dict[str, Any]


async def draw_run(options: argparse.Namespace) -> int:
    """Draw the pictures of a run and return the exit code.

    Raises:
        UserError: if the run has made no step yet.
    """
    place = find_run(options.run_name, options.dir)
    lines = read_lines(place.folder / "metrics.jsonl")
    if not lines:
        raise UserError(f"run {place.name} has made no step yet, so there is nothing to draw")
    made = [draw_rewards(place.name, lines, place.folder / "reward.png")]
    made += await asyncio.to_thread(render_before_and_after, place.folder)
    files = [str(path) for path in made if path]
    print(visible_json({"run": place.name, "files": files}) if options.json else "\n".join(files))
    return 0


def baselines(lines: list[Row]) -> dict[str, float]:
    """Return the success rates of the other evaluated policies, ``eval/<policy>/success_rate``, by
    policy.
    """
    named = [(name.split("/"), value) for line in lines for name, value in line.items()]
    return {
        parts[1]: value
        for parts, value in named
        if parts[0] == "eval" and parts[2:] == ["success_rate"]
    }


def draw_rewards(run: str, lines: list[Row], out: Path) -> Path | None:
    """Draw reward above and success rates below, by optimizer step; with several domains a thin
    curve for each.

    Return ``out``, or None if there is nothing to draw.
    """
    if not lines:
        return None
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import MaxNLocator

    figure, (above, below) = pyplot.subplots(2, 1, sharex=True, figsize=(8, 6.5))
    _plot(above, curve(lines, "reward/mean"), "training", color="tab:gray", linewidth=2)
    _plot(below, curve(lines, "env/success_rate"), "training", color="tab:blue", linewidth=2)
    _plot(
        below,
        curve(lines, "eval/success_rate"),
        "held-out tasks",
        color="tab:green",
        linewidth=2,
        marker="o",
    )
    names = domains_of(lines)
    for name in names if len(names) > 1 else []:
        _plot(above, curve(lines, f"reward/{name}/mean"), name, linewidth=1)
        _plot(below, curve(lines, f"env/domain/{name}/success_rate"), name, linewidth=1)
        rates = curve(lines, f"eval/domain/{name}/success_rate")
        _plot(below, rates, f"held-out tasks, {name}", linewidth=1, marker=".")
    for name, value in baselines(lines).items():
        below.axhline(
            value, linestyle="--", color="tab:red", label=f"{name} engine, held-out tasks"
        )
    above.set_title(run)
    above.set_ylabel("reward")
    below.set_ylabel("success rate")
    below.set_ylim(-0.02, 1.02)
    below.set_xlabel("optimizer step")
    below.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in (above, below):
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(loc="best", fontsize="small")
    figure.tight_layout()
    figure.savefig(out, dpi=120)
    pyplot.close(figure)
    return out


def curve(lines: list[Row], name: str) -> tuple[list[int], list[float]]:
    """Return steps and values of one metric, where it has any; an evaluation counts at the step
    that it measured.
    """
    own = [line for line in lines if name in line]
    key = "eval/step" if name.startswith("eval/") else "step"
    return [int(line[key] if key in line else line["step"]) for line in own], [
        line[name] for line in own
    ]


def domains_of(lines: list[Row]) -> list[str]:
    """Return the names of the trained domains, sorted."""
    named = [key.split("/") for line in lines for key in line]
    return sorted({parts[1] for parts in named if parts[0] == "reward" and parts[2:] == ["mean"]})


def _plot(axes: Any, points: tuple[list[int], list[float]], label: str, **style: Any) -> None:
    if points[0]:
        axes.plot(*points, label=label, **style)


def pick_task(before: list[Row], after: list[Row]) -> tuple[Row, Row] | None:
    """Return the same task before and after, preferably one that was failed at first and solved
    later.
    """
    later = {(row["domain"], row["task_index"]): row for row in after if row.get("frames")}
    earlier = [((row["domain"], row["task_index"]), row) for row in before if row.get("frames")]
    pairs = [(row, later[task]) for task, row in earlier if task in later]
    learned = [
        (first, last) for first, last in pairs if not first["success"][0] and last["success"][0]
    ]
    longest = max(learned, key=lambda pair: len(pair[1]["frames"]), default=None)
    return longest or (pairs[0] if pairs else None)


def render_before_and_after(folder: Path) -> list[Path]:
    """Render ``before.gif`` and ``after.gif`` with ``envhub render``; neither for environments
    without pictures.
    """
    evaluations = sorted((folder / "evals").glob("actor-step-*.jsonl"))
    pair = (
        pick_task(read_lines(evaluations[0]), read_lines(evaluations[-1]))
        if len(evaluations) > 1
        else None
    )
    if pair is None:
        return []
    made = []
    for name, row, file in zip(
        ("before", "after"), pair, (evaluations[0], evaluations[-1]), strict=True
    ):
        out = folder / f"{name}.gif"
        try:
            render(folder, row, int(file.stem.rsplit("-", 1)[1]), out)
            made.append(out)
        except UserError as error:
            print(f"no {name}.gif: {error}", file=sys.stderr)
            break  # the other one would fail alike
    return made
