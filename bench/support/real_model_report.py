"""Write the table of ``bench.real_model`` into docs/learning.md, not the text around it, and draw
its picture.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

BEGIN: Final = "<!-- figures of a pretrained model, written by python -m bench.real_model -->"
END: Final = "<!-- end of the figures of a pretrained model -->"
TITLES: Final = {
    "additions": "two-digit additions",
    "lora": "the same with LoRA",
    "words": "word problems of one and two steps",
    "forms": "instructions that demand a form",
}
SMOOTHED: Final = 5  # steps of training that one point of a curve averages
Runs = Mapping[str, Sequence[Mapping[str, Any]]]
Rows = Mapping[str, Mapping[str, Any]]


def table(rows: Rows, runs: Runs) -> str:
    """Return the table in Markdown."""
    lines = [
        "| recipe | held-out success at the start | at the end | tasks | seeds | minutes | of processor time |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        cells = [
            f"{row[end]['success']:.3f} ({row[end]['low']:.3f}-{row[end]['high']:.3f})"
            for end in ("start", "end")
        ]
        counts = f"{row['end']['tasks']} | {len(runs[name])} | {row['minutes']:.1f} | {row['cpu_minutes']:.1f}"
        lines.append(f"| {TITLES[name]} | {' | '.join(cells)} | {counts} |")
    return "\n".join(lines)


def write(docs: Path, rows: Rows, runs: Runs) -> None:
    """Put the table between its marks in docs/learning.md, and draw docs/real-model.png."""
    page = docs / "learning.md"
    text = page.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    figures = f"![](real-model.png)\n\n{table(rows, runs)}"
    page.write_text(f"{before}{BEGIN}\n\n{figures}\n\n{END}{after}", encoding="utf-8")
    draw(docs / "real-model.png", rows, runs)


def draw(path: Path, rows: Rows, runs: Runs) -> None:
    """Draw each recipe's training success by step, and its held-out success before and after with
    95 % intervals.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        1,
        len(rows),
        figsize=(3.6 * len(rows), 3.4),
        sharey=True,
        squeeze=False,
        constrained_layout=True,
    )
    for plot, (name, row) in zip(axes[0], rows.items(), strict=True):
        for run in runs[name]:
            curve = np.array(run["curve"])
            smooth = [
                curve[max(0, step - SMOOTHED + 1) : step + 1].mean() for step in range(len(curve))
            ]
            plot.plot(range(1, len(curve) + 1), smooth, color="#7aa6c2", linewidth=1)
        places = [0, max(len(run["curve"]) for run in runs[name])]
        points = np.array([row["start"]["success"], row["end"]["success"]])
        spread = np.array(
            [
                [row[end]["success"] - row[end]["low"], row[end]["high"] - row[end]["success"]]
                for end in ("start", "end")
            ]
        )
        plot.errorbar(
            places, points, yerr=spread.T.clip(0), fmt="o", color="crimson", capsize=3, markersize=4
        )
        plot.set(title=TITLES[name], xlabel="step", ylim=(-0.02, 1.02))
        plot.title.set_fontsize(9)
    axes[0][0].set_ylabel("success (line: training, points: held out, 95 %)", fontsize=8)
    figure.savefig(path, dpi=90, metadata={"Software": None})
    pyplot.close(figure)
