"""Write the table of ``bench.curves`` into docs/learning.md, not the text around it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

BEGIN: Final = "<!-- figures of recipes, written by python -m bench.curves -->"
END: Final = "<!-- end of the figures of recipes -->"


def make_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the table in Markdown."""
    lines = [
        "| recipe | random moves | after the warm start | at the end (95 %) | minutes |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        low, high = row["interval"]
        baseline = "" if row["random"] is None else f"{row['random']:.3f}"
        end = f"{row['end']:.3f} ({low:.3f}-{high:.3f})"
        cells = (row["title"], baseline, f"{row['start']:.3f}", end, f"{row['minutes']:.1f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def write(docs: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Put the table between its marks in docs/learning.md."""
    page = docs / "learning.md"
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{BEGIN}\n\n{make_table(rows)}\n\n{END}{after}", encoding="utf-8")
