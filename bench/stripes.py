"""Weights in stripes against one sender, between hosts that are network namespaces of this machine;
needs root.

    python -m bench.stripes [--pairs 5] [--layers 11]

Four ranks on two hosts hold equal rows of a model and send them to a server on a third host.
``stripes_ratio``: seconds of gathering on rank 0, which broadcasts what has come / seconds of all
ranks sending their rows; medians of interleaved pairs, the learner hosts' links limited to 1 Gbit/s
and the server's to 2 Gbit/s in each direction.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from typing import Any

from bench.support.hosts.network_namespaces import host_network, why_not
from bench.support.hosts.striped_ends import limit_links, measure_stripes

LINKS_MBIT = [1000, 1000, 2000]


def measure(pairs: int, layers: int) -> dict[str, Any]:
    """Return the figures.

    Raises:
        RuntimeError: if an end fails.
    """
    with host_network(3) as network:
        limit_links(network, LINKS_MBIT)
        found = measure_stripes(network, layers=layers, pairs=pairs)
    striped, gathered = (statistics.median(column) for column in zip(*found["pairs"], strict=True))
    ratio = statistics.median(pair[1] / pair[0] for pair in found["pairs"])
    return {
        "stripes_ratio": round(ratio, 2),
        "striped_s": round(striped, 2),
        "gathered_s": round(gathered, 2),
        "model_bytes": found["size_bytes"],
        "pairs": len(found["pairs"]),
    }


def main() -> int:
    """Measure and print the result."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.stripes", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--layers", type=int, default=11, help="of 37 MB each (%(default)s)")
    options = parser.parse_args()
    if problem := why_not():
        print(f"python -m bench.stripes: {problem}", file=sys.stderr)
        return 2
    print(json.dumps(measure(options.pairs, options.layers)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
