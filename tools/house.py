"""Measures the house rules and compares them with their limits.

    python -m tools.house [--list KEY] [PATH ...]

Without paths all packages are measured. The last line is one JSON object; the exit code is 1 where
a figure is beyond its limit. ``--list`` prints the places that count against one figure.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Final

from tools.surface import measure

ROOT: Final = Path(__file__).parents[1]
PRODUCT: Final = (
    "broker", "learner", "rollout", "envhub", "rewardhub", "rlearner", "rlearner_text", "rlearner_sandbox",
)  # fmt: skip
AT_MOST: Final = {
    "pronoun_names": 0.01,
    "one_names": 0,
    "tuple_packs_per_1k": 3,
    "one_word_functions": 0.25,
    "conditional_per_1k": 12,
    "lines_over_100": 0,
    "positional_over_5": 0,
    "tuple_splats": 0,
}
AT_LEAST: Final = {"comment_lines": 0.02}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("paths", nargs="*", type=Path)
    parser.add_argument("--list", metavar="KEY")
    options = parser.parse_args()
    roots = options.paths or [ROOT / name for name in PRODUCT]
    surface = measure(
        sorted(
            file for root in roots for file in ([root] if root.is_file() else root.rglob("*.py"))
        )
    )
    for place in surface.places.get(options.list or "", []):
        print(place)
    figures = surface.figures()
    beyond = [key for key, limit in AT_MOST.items() if figures[key] > limit]
    beyond += [key for key, limit in AT_LEAST.items() if figures[key] < limit]
    for key in beyond:
        print(
            f"{key}: {figures[key]}, beyond its limit {AT_MOST.get(key, AT_LEAST.get(key))}",
            file=sys.stderr,
        )
    print(json.dumps({**figures, "beyond": beyond}))
    return 1 if beyond else 0


if __name__ == "__main__":
    sys.exit(main())
