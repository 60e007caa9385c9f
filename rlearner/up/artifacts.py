"""Draws what ``rlearner up`` leaves: reward.png, GIFs before and after training, and a summary."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from broker.errors import UserError
from learner.credit import ledger_file, ledger_segments
from learner.reporting.metrics import read_lines
from learner.reporting.showcase import render
from rlearner.up.board import duration
from rlearner.up.failures import NO_FAULT, by_reason

Row = dict[str, Any]


def write_artifacts(folder: Path, seconds: float, cpu_s: dict[str, float], resume: str) -> None:
    """Draw the pictures of a run's folder, and print what happened and what to do next.

    Args:
        resume: the command that continues the run.
    """
    failed = failures_of(folder)
    lines = read_lines(folder / "metrics.jsonl")
    if not lines:
        print("\n".join([f"stopped before the first step; logs are in {folder / 'logs'}", *failed, "", "next:", f"  {resume}"]))
        return
    made = [draw_rewards(folder.name, lines, folder / "reward.png"), *render_before_and_after(folder)]
    print("\n".join(summary(folder, lines, [path for path in made if path], seconds, cpu_s, failed, resume)))


def failures_of(folder: Path) -> list[str]:
    """Return one line that counts the run's failed groups, or nothing if none failed."""
    _, dead = ledger_file.final_counts(ledger_segments.read_newest(folder / ledger_segments.FOLDER)[0])
    failed = {reason: count for reason, count in dead.items() if reason not in NO_FAULT}
    return [f"failed groups: {by_reason(failed)}; see {folder / 'logs'}, or rlearner trace {folder} TICKET"] if failed else []


def summary(
    folder: Path,
    lines: list[Row],
    made: list[Path],
    seconds: float,
    cpu_s: dict[str, float],
    failed: list[str],
    resume: str,
) -> list[str]:
    """Return the lines printed at the end.

    Args:
        made: the pictures.
        seconds: since the start of the broker.
        cpu_s: processor seconds by process.
        failed: the result of ``failures_of``.
        resume: the command that continues the run.
    """
    last = lines[-1]
    measured = [(line.get("eval/step", line["step"]), line["eval/success_rate"]) for line in lines if "eval/success_rate" in line]
    words = ["", f"{last['step']} steps in {duration(seconds)}"]
    if measured:
        words.append("success on held-out tasks: " + ", ".join(f"{rate:.3f} after step {step:.0f}" for step, rate in measured))
    words += [f"success of the {name} engine on the same tasks: {rate:.3f}" for name, rate in baselines(lines).items()]
    counts = " + ".join(f"{last.get(f'ticket/{name}', 0):.0f} {name}" for name in ("trained", "filtered", "dropped", "dead", "open"))
    total = sum(cpu_s.values()) or 1.0
    words.append("processor time: " + ", ".join(f"{name} {used:.1f} s ({used / total:.1%})" for name, used in cpu_s.items()))
    words += [f"tickets: {last.get('ticket/issued', 0):.0f} issued = {counts}", *failed, ""]
    newest = max((folder / "checkpoints").glob("step-*"), default=None)
    words += [f"  {path}" for path in [folder / "metrics.jsonl", *made, *([newest] if newest else [])]]
    words += ["", "next:", f"  {resume}", f"  tensorboard --logdir {folder / 'tensorboard'}"]
    if newest:
        words.append(f"  python -c \"from transformers import AutoModelForCausalLM as M; print(M.from_pretrained('{newest}'))\"")
    words.append("  change a setting: rlearner up <the same file> algorithm.clip_high=0.28 train.max_staleness=4")
    return words


def baselines(lines: list[Row]) -> dict[str, float]:
    """Return the success rates of the other evaluated policies, ``eval/<policy>/success_rate``, by policy."""
    named = [(name.split("/"), value) for line in lines for name, value in line.items()]
    return {parts[1]: value for parts, value in named if len(parts) == 3 and parts[0] == "eval" and parts[2] == "success_rate"}


def draw_rewards(run: str, lines: list[Row], out: Path) -> Path | None:
    """Draw reward above and success rates below, by optimizer step; with several domains a thin curve for each.

    Returns:
        ``out``, or None if there is nothing to draw.
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
    _plot(below, curve(lines, "eval/success_rate"), "held-out tasks", color="tab:green", linewidth=2, marker="o")
    names = domains_of(lines)
    for name in names if len(names) > 1 else []:
        _plot(above, curve(lines, f"reward/{name}/mean"), name, linewidth=1)
        _plot(below, curve(lines, f"env/domain/{name}/success_rate"), name, linewidth=1)
        _plot(below, curve(lines, f"eval/domain/{name}/success_rate"), f"held-out tasks, {name}", linewidth=1, marker=".")
    for name, value in baselines(lines).items():
        below.axhline(value, linestyle="--", color="tab:red", label=f"{name} engine, held-out tasks")
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
    """Return steps and values of one metric, where it has any; an evaluation counts at the step that it measured."""
    own = [line for line in lines if name in line]
    key = "eval/step" if name.startswith("eval/") else "step"
    return [int(line[key] if key in line else line["step"]) for line in own], [line[name] for line in own]


def domains_of(lines: list[Row]) -> list[str]:
    """Return the names of the trained domains, sorted."""
    return sorted({parts[1] for line in lines for key in line if (parts := key.split("/"))[0] == "reward" and parts[2:] == ["mean"]})


def _plot(axes: Any, points: tuple[list[int], list[float]], label: str, **style: Any) -> None:
    if points[0]:
        axes.plot(*points, label=label, **style)


def pick_task(before: list[Row], after: list[Row]) -> tuple[Row, Row] | None:
    """Return the same task before and after, preferably one that was failed at first and solved later."""
    later = {(row["domain"], row["task_index"]): row for row in after if row.get("frames")}
    pairs = [(row, later[key]) for row in before if row.get("frames") and (key := (row["domain"], row["task_index"])) in later]
    learned = [(first, last) for first, last in pairs if not first["success"][0] and last["success"][0]]
    longest = max(learned, key=lambda pair: len(pair[1]["frames"]), default=None)
    return longest or (pairs[0] if pairs else None)


def render_before_and_after(folder: Path) -> list[Path]:
    """Render ``before.gif`` and ``after.gif`` with ``envhub render``; neither for environments without pictures."""
    evaluations = sorted((folder / "evals").glob("actor-step-*.jsonl"))
    pair = pick_task(read_lines(evaluations[0]), read_lines(evaluations[-1])) if len(evaluations) > 1 else None
    if pair is None:
        return []
    made = []
    for name, row, file in zip(("before", "after"), pair, (evaluations[0], evaluations[-1]), strict=True):
        out = folder / f"{name}.gif"
        try:
            render(folder, row, int(file.stem.rsplit("-", 1)[1]), out)
            made.append(out)
        except UserError as error:
            print(f"no {name}.gif: {error}", file=sys.stderr)
    return made
