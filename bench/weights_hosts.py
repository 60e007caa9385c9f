"""Weight channel between two hosts, which are network namespaces of this machine; needs root.

    python -m bench.weights_hosts [--pairs 15] [--slow-pairs 3] [--layers 12]

``ratio_gloo`` and ``ratio_curve``: seconds of a bare gloo broadcast of the same bytes / seconds of
one transfer of a version that lies packed and digested (handshake, buckets, the receiver's digest,
confirmation), between two namespaces on a bridge, medians of interleaved pairs. ``ratio_delta``: on
a link of 100 ms (round trip) and 100 Mbit/s, seconds of a whole transfer / seconds of one that
sends only what has changed, 3 % of the elements of a bfloat16 model, anywhere; ``ratio_fp8``: whole
as bfloat16 / whole as FP8 on the same link. ``exact``: what arrived was the sender's, bit by bit.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from typing import Any, Final

from bench.support.hosts.network_namespaces import host_network, why_not
from bench.support.hosts.slow_tunnel import slow_tunnel
from bench.support.hosts.weights_between import measure_between

ROUND_TRIP_MS: Final = 100.0
MBIT_PER_S: Final = 100.0


def figures_of(fast: dict[str, Any], slow: dict[str, Any]) -> dict[str, Any]:
    """Return the medians."""
    gbytes = fast["size_bytes"] / 1e9
    figures: dict[str, Any] = {}
    for column, name in enumerate(("gloo", "curve"), 1):
        ratio = statistics.median(pair[0] / pair[column] for pair in fast["pairs"])
        speed = statistics.median(gbytes / pair[column] for pair in fast["pairs"])
        figures |= {f"ratio_{name}": round(ratio, 3), f"{name}_gbytes_per_s": round(speed, 3)}
    for column, name in enumerate(("delta", "fp8"), 1):
        figures[f"ratio_{name}"] = round(
            statistics.median(row[0] / row[column] for row in slow["rounds"]), 3
        )
        figures[f"{name}_bytes_ratio"] = round(
            statistics.median(r[0] / r[column] for r in slow["sent_bytes"]), 3
        )
    seconds = {
        f"{name}_s": round(statistics.median(row[column] for row in slow["rounds"]), 3)
        for column, name in enumerate(("whole", "delta", "fp8"))
    }
    bare = statistics.median(gbytes / pair[0] for pair in fast["pairs"])
    figures |= seconds | {"bare_gbytes_per_s": round(bare, 3), "pairs": len(fast["pairs"])}
    return figures | {"slow_pairs": len(slow["rounds"]), "exact": fast["exact"] and slow["exact"]}


def main() -> int:
    """Measure and print the result."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.weights_hosts", description=(__doc__ or "").split("\n")[0]
    )
    add = parser.add_argument
    add("--pairs", type=int, default=15)
    add("--slow-pairs", type=int, default=3)
    add("--bucket-mib", type=float, default=32.0)
    add("--layers", type=int, default=12)
    add(
        "--backend",
        choices=("gloo", "curve"),
        default="gloo",
        help="carrier on the slow link (%(default)s)",
    )
    options = parser.parse_args()
    if problem := why_not():
        print(f"python -m bench.weights_hosts: {problem}", file=sys.stderr)
        return 2
    given = vars(options)
    with host_network(2) as network:
        fast = measure_between(
            network, (network.addresses[0], network.addresses[1]), "carriers", given
        )
        with slow_tunnel(network, delay_ms=ROUND_TRIP_MS / 2, mbit_per_s=MBIT_PER_S) as ends:
            slow = measure_between(network, ends, "slow", given)
    print(json.dumps(figures_of(fast, slow)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
