"""Command line of ``rollout-server``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Final

from broker.runtime import process
from broker.settings.arguments import ArgumentParser, complete, port
from broker.system.entry import enter
from rollout import service

HTTP_PORT: Final = 8000
EXAMPLES: Final = {
    "rollout-server": [
        "rollout-server --run quick --gpus 4-7",
        "rollout-server --engine random --policy random",
        "rollout-server max_running=32 --http=8000",
    ]
}


def _port(value: str) -> int:
    try:
        return port(value)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}; put settings before --http, or write --http=PORT") from None


def parser() -> argparse.ArgumentParser:
    """Return the argument parser of ``rollout-server``."""
    result = ArgumentParser(
        prog="rollout-server",
        description="Serve a policy to the environment hubs of a run; any number of servers may join and leave.",
    )
    process.add_join_options(result)
    result.add_argument(
        "--gpus", default="auto", metavar="LIST", help="GPUs to use: 4-7, or 0,2, or cpu, or auto (%(default)s)"
    )
    result.add_argument(
        "--engine",
        default=None,
        metavar="NAME",
        help="engine, overrides the run's rollout.engine, for example hf or random",
    )
    result.add_argument(
        "--policy", default=None, metavar="NAME", help="policy to serve, overrides the run's rollout.policy (actor)"
    )
    result.add_argument(
        "--model", default=None, metavar="PATH", help="fixed weights to serve, for a policy other than actor"
    )
    result.add_argument(
        "--snapshot",
        default=None,
        metavar="PLACE",
        help="folder or HTTP address of the run's snapshots, to start from while the learner is unavailable "
        "(runs/RUN/snapshots)",
    )
    result.add_argument(
        "--http",
        default=None,
        nargs="?",
        const=HTTP_PORT,
        type=_port,
        metavar="PORT",
        help=f"serve an OpenAI-compatible HTTP API on this port ({HTTP_PORT}), 0 for any free one; write --http=PORT "
        f"before settings",
    )
    result.add_argument(
        "overrides", nargs="*", metavar="key=value", help="settings of the section rollout, for example max_running=32"
    )
    return complete(result, EXAMPLES)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the server and return its exit code."""

    def run() -> int:
        options = parser().parse_args(arguments)
        return process.main("rollout", lambda stop: service.run(options, stop))

    return enter(run)


if __name__ == "__main__":
    sys.exit(main())
