"""Write the table and the plot of docs/learning.md, without changing the text around them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from bench.learning.settings import CHANGED, STALENESS

BEGIN = "<!-- figures, written by python -m bench.learning -->"
END = "<!-- end of the figures -->"
GOAL: Final = 1.5
Rows = Mapping[str, Mapping[str, Any]]


def tables(figures: Mapping[str, Any]) -> str:
    lines = [
        "| algorithm | success at the end | 95 % | times the start | seeds | core-seconds | other settings than the "
        "preset's |"
    ]
    lines += ["|---|---|---|---|---|---|---|"]
    for name, row in sorted(figures["algorithms"].items(), key=lambda item: -item[1]["end"]):
        mark = "" if row["ratio"] >= GOAL else " **(below 1.5)**"
        changed = (
            ", ".join(f"`{one.removeprefix('algorithm.')}`" for one in CHANGED.get(name, ()))
            or "none"
        )
        interval = f"{row['low']:.3f}-{row['high']:.3f}"
        lines.append(
            f"| `{name}` | {row['end']:.3f} | {interval} | {row['ratio']:.2f}{mark} | {row['seeds']} | "
            f"{row['seconds']:.0f} | {changed} |"
        )
    if figures["staleness"]:
        lines += ["", "| loss | " + " | ".join(f"{late} late" for late in STALENESS) + " |"]
        lines.append("|---|" + "---|" * len(STALENESS))
        for name, by_late in figures["staleness"].items():
            lines.append(
                f"| `{name}` | "
                + " | ".join(_cell(by_late.get(str(late))) for late in STALENESS)
                + " |"
            )
    return "\n".join(lines)


def _cell(row: Mapping[str, float] | None) -> str:
    return (
        "not run"
        if row is None
        else f"{row['success']:.3f} ({row['low']:.3f}-{row['high']:.3f}; {row['seeds']:.0f})"
    )


def write(
    docs: Path, figures: Mapping[str, Any], curves: Mapping[str, Sequence[Sequence[float]]]
) -> None:
    """Put the tables between their marks in docs/learning.md, and draw docs/learning.png."""
    page = docs / "learning.md"
    new = f"# Learning curves\n\n![](learning.png)\n\n{BEGIN}\n{END}\n"
    text = page.read_text(encoding="utf-8") if page.exists() else new
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{BEGIN}\n\n{tables(figures)}\n\n{END}{after}", encoding="utf-8")
    draw(docs / "learning.png", figures, curves)


def draw(
    path: Path, figures: Mapping[str, Any], curves: Mapping[str, Sequence[Sequence[float]]]
) -> None:
    """Draw held-out success of each algorithm, training rewards, and success against staleness."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(17, 6), constrained_layout=True)
    rows = sorted(figures["algorithms"].items(), key=lambda item: item[1]["end"])
    _bars(left, rows)
    for index, (name, _) in enumerate(reversed(rows)):
        if name in curves:
            mean = np.mean(curves[name], axis=0)
            smooth = [mean[max(0, i - 3) : i + 1].mean() for i in range(len(mean))]
            middle.plot(
                smooth,
                color=pyplot.get_cmap("turbo")(index / max(1, len(rows) - 1)),
                label=name,
                linewidth=1,
            )
    middle.set(xlabel="step", title="Mean reward while training (last four steps)")
    if rows:
        middle.legend(fontsize=7, ncols=2)
    for name, by_late in figures["staleness"].items():
        places = [STALENESS.index(int(late)) for late in by_late]
        success = np.array([row["success"] for row in by_late.values()])
        spread = np.abs(
            np.array(
                [
                    [row["low"] for row in by_late.values()],
                    [row["high"] for row in by_late.values()],
                ]
            )
            - success
        )
        right.errorbar(places, success, yerr=spread, marker="o", capsize=3, label=name)
    right.set(
        xticks=range(len(STALENESS)),
        xlabel="versions late, exactly",
        title="Held-out success, 95 %",
    )
    right.set_xticklabels([str(late) for late in STALENESS])
    if figures["staleness"]:
        right.legend()
    figure.savefig(path, dpi=90, metadata={"Software": None})
    pyplot.close(figure)


def _bars(axes: Any, rows: Sequence[tuple[str, Mapping[str, float]]]) -> None:
    axes.barh([name for name, _ in rows], [row["end"] for _, row in rows], color="#7aa6c2")
    for place, (_, row) in enumerate(rows):
        axes.plot([row["low"], row["high"]], [place, place], color="black", linewidth=1)
    if rows:
        for place, (_, row) in enumerate(rows):
            ends = [place - 0.4, place + 0.4]
            label = "" if place else "warm start"
            axes.plot([row["start"]] * 2, ends, color="gray", linestyle=":", label=label)
            goal = "" if place else f"{GOAL} times"
            axes.plot([GOAL * row["start"]] * 2, ends, color="crimson", label=goal)
        axes.legend(loc="lower right", fontsize=8)
    axes.set(title="Held-out success after training, 95 %", xlim=(0, 1))
