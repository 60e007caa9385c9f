"""Run the measurements of ``bench.scale``, all or those named, each in a separate process; print
one JSON object last.

Usage: python -m bench.scale [NAME ...]
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from importlib import import_module
from typing import Any, Final

# Module of this package -> what its `measure()` returns is merged into the object that is printed
# last.
MEASUREMENTS: Final = (
    "processes",
    "throughput",
    "spreads",
    "resume",
    "groups",
    "intake",
    "soak",
    "marks",
)


def main(names: list[str]) -> int:
    """Run the named measurements (all by default); exit code 1 if any failed."""
    if unknown := [name for name in names if name not in MEASUREMENTS]:
        print(
            f"error: no measurement {unknown[0]!r}; there are {', '.join(MEASUREMENTS)}",
            file=sys.stderr,
        )
        return 2
    result: dict[str, Any] = {}
    failed = False
    for name in names or MEASUREMENTS:
        began = time.monotonic()
        # A process each: memory and imports of one measurement must not show up in the next.
        command = [sys.executable, "-m", "bench.scale", "--one", name]
        child = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if child.returncode:
            failed = True
            print(f"{name}: failed with exit code {child.returncode}", file=sys.stderr)
            continue
        values: dict[str, Any] = json.loads(child.stdout.splitlines()[-1])
        print(f"{name}: {time.monotonic() - began:.0f} s: {json.dumps(values)}", file=sys.stderr)
        result |= values
    print(json.dumps(result))
    return int(failed)


def run_one(name: str) -> int:
    """Run one measurement here and print what it returns."""
    values: dict[str, Any] = import_module(f"bench.scale.{name}").measure()
    print(json.dumps(values))
    return 0


if __name__ == "__main__":
    sys.exit(run_one(sys.argv[2]) if sys.argv[1:2] == ["--one"] else main(sys.argv[1:]))
