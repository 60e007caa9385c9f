"""``rlearner draw``: draws the pictures that ``rlearner up`` draws at its end, for any run."""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path
from typing import Any

from broker.errors import UserError
from broker.system.visible_text import visible_json
from learner.evaluation.pass_at_k import success_interval
from learner.reporting.metrics import read_lines, step_of
from learner.reporting.showcase import render_episode
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
    paths = [draw_rewards(place.name, lines, place.folder / "reward.png")]
    paths += await asyncio.to_thread(render_before_and_after, place.folder)
    files = [str(path) for path in paths if path]
    if options.json:
        print(visible_json({"run": place.name, "files": files}))
    else:
        print("\n".join(files))
    return 0


def baseline_rates(lines: list[Row]) -> dict[str, float]:
    """Return the success rates of the other evaluated policies by policy."""
    values = [(name.split("/"), value) for line in lines for name, value in line.items()]
    return {
        parts[1]: value
        for parts, value in values
        if parts[0] == "eval" and parts[2:] == ["success_rate"]
    }


def draw_rewards(run: str, lines: list[Row], out: Path) -> Path | None:
    """Draw reward above and success rates below, by step; of several domains each as a thin curve.

    Curves of training are smoothed, above pale ones of each step; held-out tasks have the 95 %
    intervals of the evaluations next to ``out``. Return ``out``, or None if there is nothing to
    draw.
    """
    if not lines:
        return None
    import matplotlib

    # No display is needed to write a file.
    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import MaxNLocator

    figure, (above, below) = pyplot.subplots(2, 1, sharex=True, figsize=(8, 6.5))
    _plot_points(
        above, metric_curve(lines, "reward/mean"), "training", color="tab:gray", linewidth=2
    )
    _plot_points(
        below, metric_curve(lines, "env/success_rate"), "training", color="tab:blue", linewidth=2
    )
    _plot_points(
        below,
        metric_curve(lines, "eval/success_rate"),
        "held-out tasks",
        color="tab:green",
        linewidth=2,
        marker="o",
    )
    intervals = evaluation_intervals(out.parent)
    lows = [low for low, _ in intervals.values()]
    highs = [high for _, high in intervals.values()]
    below.vlines(list(intervals), lows, highs, color="tab:green", alpha=0.5)
    names = domains_of(lines)
    if len(names) == 1:  # its curves would hide those of the whole run
        names = []
    for name in names:
        _plot_points(above, metric_curve(lines, f"reward/{name}/mean"), name, linewidth=1)
        _plot_points(
            below, metric_curve(lines, f"env/domain/{name}/success_rate"), name, linewidth=1
        )
        rates = metric_curve(lines, f"eval/domain/{name}/success_rate")
        _plot_points(below, rates, f"held-out tasks, {name}", linewidth=1, marker=".")
    for name, value in baseline_rates(lines).items():
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


def metric_curve(lines: list[Row], name: str) -> tuple[list[int], list[float]]:
    """Return steps and values of one metric; an evaluation counts at its own step."""
    rows = [line for line in lines if name in line]
    return [step_of(row, name) for row in rows], [row[name] for row in rows]


def domains_of(lines: list[Row]) -> list[str]:
    """Return the names of the domains that were trained or evaluated, sorted."""
    names = [key.split("/") for line in lines for key in line]
    trained = {parts[1] for parts in names if parts[0] == "reward" and parts[2:] == ["mean"]}
    evaluated = {parts[2] for parts in names if parts[:2] == ["eval", "domain"]}
    return sorted(trained | evaluated)


def _plot_points(
    axes: Any, points: tuple[list[int], list[float]], label: str, **style: Any
) -> None:
    steps, values = points
    is_training = "marker" not in style
    if is_training and (smoothed := smooth_curve(values)) != values:
        axes.plot(steps, values, label=f"_{label}", **style | {"alpha": 0.25, "linewidth": 1})
        values = smoothed
    if steps:
        axes.plot(steps, values, label=label, **style)


def smooth_curve(values: list[float]) -> list[float]:
    """Return the mean around each value, over a tenth of the curve; fewer at its ends."""
    reach = len(values) // 20
    windows = [values[max(0, i - reach) : i + reach + 1] for i in range(len(values))]
    return [sum(window) / len(window) for window in windows]


def evaluation_intervals(folder: Path) -> dict[int, tuple[float, float]]:
    """Return the 95 % interval of the actor's success on held-out tasks, by step."""
    intervals = {}
    for path in sorted((folder / "evals").glob("actor-step-*.jsonl")):
        tries = [row["success"] for row in read_lines(path) if row.get("success")]
        if tries:
            intervals[int(path.stem.rsplit("-", 1)[1])] = success_interval(tries)
    return intervals


def pick_task(first_rows: list[Row], last_rows: list[Row]) -> tuple[Row, Row] | None:
    """Return rows of one task from two evaluations, preferably failed first and solved later."""
    later = {(row["domain"], row["task_index"]): row for row in last_rows if row.get("frames")}
    pairs = []
    for row in first_rows:
        task = (row["domain"], row["task_index"])
        if row.get("frames") and task in later:
            pairs.append((row, later[task]))
    learned = [
        (first, last) for first, last in pairs if not first["success"][0] and last["success"][0]
    ]
    # The longest episode shows the most.
    longest = max(learned, key=lambda pair: len(pair[1]["frames"]), default=None)
    return longest or next(iter(pairs), None)


def render_before_and_after(folder: Path) -> list[Path]:
    """Render ``before.gif`` and ``after.gif``, for environments with pictures."""
    evaluations = sorted((folder / "evals").glob("actor-step-*.jsonl"))
    if len(evaluations) < 2:
        return []
    pair = pick_task(read_lines(evaluations[0]), read_lines(evaluations[-1]))
    if pair is None:
        return []
    paths = []
    for name, row, file in zip(
        ("before", "after"), pair, (evaluations[0], evaluations[-1]), strict=True
    ):
        out = folder / f"{name}.gif"
        try:
            render_episode(folder, row, int(file.stem.rsplit("-", 1)[1]), out)
            paths.append(out)
        except UserError as error:
            print(f"no {name}.gif: {error}", file=sys.stderr)
            break  # the second would fail for the same reason
    return paths
