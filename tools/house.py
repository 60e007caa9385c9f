"""Measures the house rules and compares them with their limits.

    python -m tools.house [--list KEY] [PATH ...]

Without paths the whole project is measured; with paths only what is counted line by line. The last
line is one JSON object; the exit code is 1 where a figure is beyond its limit. ``--list`` prints
the places that count against one.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tools.structure import measure_structure
from tools.surface import measure

ROOT: Final = Path(__file__).parents[1]
PRODUCT: Final = (
    "broker",
    "learner",
    "rollout",
    "envhub",
    "rewardhub",
    "rlearner",
    "rlearner_text",
    "rlearner_sandbox",
    "rlearner_workers",
)
# Statements of the product before names, settings and carriers were worked over (commit 50e2a8ff).
FIRST_STATEMENTS: Final = 68_901
AT_MOST: Final = {
    "pronoun_names": 0.01,
    "one_names": 0,
    "tuple_packs_per_1k": 3,
    "one_word_functions": 0.25,
    "conditional_per_1k": 12,
    "lines_over_100": 0,
    "positional_over_5": 0,
    "tuple_splats": 0,
    "one_word_classes": 0.12,
    "repeated_class_names": 6,
    "max_modules_per_folder": 20,
    "functions_over_45_statements": 6,
    "import_cycles": 0,
    "upward_arrows": 0,
    "settings_as_dict": 0,
    "files_spelling_nccl": 8,
    "undeclared_metrics": 0,
    "undocumented_settings": 0,
    "stray_unit_tests": 0,
    "archaic": 0,
    "statements_share": 0.97,
    "bench_lines": 9500,
}
AT_LEAST: Final = {"comment_lines": 0.02}
# Where the limit is not reached yet, no figure may become worse than this.
REACHED: Final[Mapping[str, float]] = {
    "conditional_per_1k": 13.83,
    "comment_lines": 0.0168,
    "lines_over_100": 195,
    "one_word_classes": 0.192,
    "repeated_class_names": 10,
    "max_modules_per_folder": 26,
    "functions_over_45_statements": 8,
    "stray_unit_tests": 160,
    "statements_share": 1.311,
    "bench_lines": 25_420,
}


def find_excess(figures: Mapping[str, float]) -> list[str]:
    """Return a line for each figure beyond its limit, or worse than what was reached before."""
    lines = []
    for key, figure in figures.items():
        limit = REACHED.get(key, AT_LEAST.get(key, AT_MOST.get(key, 0)))
        if (figure < limit) if key in AT_LEAST else (figure > limit):
            lines.append(f"{key}: {figure}, beyond its limit {limit}; see --list {key}")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("paths", nargs="*", type=Path)
    parser.add_argument("--list", metavar="KEY")
    options = parser.parse_args()
    roots = options.paths or [ROOT / name for name in PRODUCT]
    files = [file for root in roots for file in ([root] if root.is_file() else root.rglob("*.py"))]
    surface = measure(sorted(files))
    figures = surface.figures()
    places = dict(surface.places)
    if not options.paths:
        for key, value in measure_structure(ROOT, PRODUCT, FIRST_STATEMENTS).items():
            figures[key] = len(value) if isinstance(value, list) else value
            places[key] = value if isinstance(value, list) else []
    for place in places.get(options.list or "", []):
        print(place)
    excess = find_excess(figures)
    print(*excess, sep="\n", file=sys.stderr)
    print(json.dumps({**figures, "beyond": len(excess)}))
    return 1 if excess else 0


if __name__ == "__main__":
    sys.exit(main())
