"""A learner over several nodes, measured part by part.

    python -m bench.nodes [--only NAME] [--runs 3]

``losses``: ddp on two nodes of two ranks, which are network namespaces (needs root):
``max_loss_difference``, the largest difference of five steps' losses and gradient norms from those
of one process; ``recover_s``, the seconds from the death of a node (SIGKILL of all its processes)
to the next step, with supervisors that start what has ended, median of the runs.

``stripes``: ``stripes_ratio`` (bench.stripes, needs root). ``memory``: ``peak_load_ratio`` and
``peak_checkpoint_ratio`` (bench.nodes_memory). ``plan``: ``plan_error`` (bench.plan).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any, Final

PARTS: Final = {
    "losses": "bench.nodes.losses",
    "stripes": "bench.nodes.stripes",
    "memory": "bench.nodes.memory",
    "plan": "bench.nodes.plan",
}


def main() -> int:
    """Measure and print the figures as one JSON line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.nodes", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--only", choices=sorted(PARTS))
    parser.add_argument(
        "--runs", type=int, default=3, help="of each measurement of time (%(default)s)"
    )
    options = parser.parse_args()
    figures: dict[str, Any] = {}
    for name in [options.only] if options.only else PARTS:
        with tempfile.TemporaryDirectory(prefix=f"rlearner-nodes-{name}-") as folder:
            found = import_module(PARTS[name]).measure(Path(folder), options.runs)
        print(f"{name}: {json.dumps(found)}", file=sys.stderr, flush=True)
        figures |= found
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
