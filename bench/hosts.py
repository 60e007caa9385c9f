"""A run on several hosts, which are network namespaces of this machine; needs root.

    python -m bench.hosts [--only run|weights|cost] [--cut-s 30] [--steps 60]

``run``: the quickstart on three hosts, nothing on loopback: broker and learner; two rollout
servers; two environment hubs and a reward hub, which join with tokens over TLS and see none of the
learner's files. Every process is killed once (SIGKILL), both hosts are cut off for 30 s, and a
token is revoked. ``lost`` and ``trained_twice`` are the audit's; ``success_start`` and
``success_end`` are the held-out success; ``join_s`` is the time from the command of the first
environment hub to the first episode on the broker, with tickets waiting. ``weights``: see
``bench.weights_hosts``. ``cost``: ``identity_cost``, the extra processor time of 200 tickets of the
random engine compared with a broker without logins, median of interleaved pairs, as a share of the
quickstart's processor time; and ``accounts``: of a broker with 50 runs, the size of its accounts,
the median time of a reload for one more token, and what 11 of them ``dropped``: connections of
working processes, and tickets.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from bench.support.hosts.account_reloads import measure_accounts
from bench.support.hosts.identity_cost import measure_cost
from bench.support.hosts.network_namespaces import why_not
from bench.support.hosts.quickstart_run import measure_run

PARTS: Final = ("run", "weights", "cost")


def main() -> int:
    """Measure and print the result."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.hosts", description=(__doc__ or "").split("\n")[0]
    )
    add = parser.add_argument
    add("--only", choices=PARTS)
    add(
        "--cut-s",
        type=float,
        default=30.0,
        help="seconds for which each host is cut off (%(default)s)",
    )
    add("--steps", type=int, default=60, help="of the run on three hosts (%(default)s)")
    add("--cost-pairs", type=int, default=5)
    options = parser.parse_args()
    if problem := why_not():
        print(f"python -m bench.hosts: {problem}", file=sys.stderr)
        return 2
    parts = [options.only] if options.only else PARTS
    figures = dict[str, Any]()
    with tempfile.TemporaryDirectory(prefix="rlearner-hosts-") as folder:
        if "run" in parts:
            figures |= measure_run(Path(folder), options.cut_s, options.steps)
        if "weights" in parts:
            command = [sys.executable, "-m", "bench.weights_hosts"]
            said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            figures |= json.loads(said.splitlines()[-1])
        if "cost" in parts:
            figures["accounts"] = measure_accounts(Path(folder) / "accounts")
            figures |= measure_cost(Path(folder) / "cost", options.cost_pairs)
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
