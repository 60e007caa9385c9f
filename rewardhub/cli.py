"""The command ``rewardhub``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Final

from broker.runtime import process
from broker.settings.arguments import ArgumentParser, complete, count, names, tokens
from broker.system.children import hide_memory
from broker.system.entry import enter

EXAMPLES: Final = {
    "rewardhub": [
        "rewardhub --run quick",
        "rewardhub --rewards judge --workers 2",
        "rewardhub --run quick --metrics-port 9468 --metrics-bind 10.0.0.3",
    ]
}


def parser() -> argparse.ArgumentParser:
    """Return the parser of ``rewardhub``."""
    about = "Score episodes for a run; any number of reward hubs may join and leave."
    result = ArgumentParser(prog="rewardhub", description=about)
    choice = result.add_mutually_exclusive_group()
    pools = "reward pools to serve (all)"
    rewards = "serve the pools with these rewards, for example code or judge"
    choice.add_argument("--pools", type=tokens, default=[], metavar="A,B", help=pools)
    choice.add_argument("--rewards", type=names, default=[], metavar="A,B", help=rewards)
    on_each = (
        "GPUs for reward models, one process of each model per GPU: 4-7, or 0,2, or cpu, "
        "or auto (%(default)s)"
    )
    result.add_argument("--gpus", default="auto", metavar="LIST", help=on_each)
    result.add_argument(
        "--workers", type=count, metavar="N", help="worker processes (the run's rewardhub.workers)"
    )
    process.add_join_options(result)
    return complete(result, EXAMPLES)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the hub and return the exit code."""
    from rewardhub.service import serve

    def run() -> int:
        options = parser().parse_args(argv)
        hide_memory()
        return process.main("rewardhub", lambda stop: serve(options, stop))

    return enter(run)


if __name__ == "__main__":
    sys.exit(main())
