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
        "rollout-server --gpus 0 --share-gpus",
        "rollout-server --engine random --policy random",
        "rollout-server max_running=32 --http=8000",
        "rollout-server --gpus 4-7 --metrics-port 9470     # 9471 … for the servers of single GPUs",
        "rollout-server --http=8000 --http-bind 10.0.0.1 --tls-cert cert.pem --tls-key key.pem",
    ]
}


def _port(value: str) -> int:
    try:
        return port(value)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(
            f"{error}; put settings before --http, or write --http=PORT"
        ) from None


def parser() -> argparse.ArgumentParser:
    """Return the argument parser of ``rollout-server``."""
    result = ArgumentParser(
        prog="rollout-server", description="Serve a policy to the environment hubs of a run."
    )
    add = result.add_argument
    process.add_join_options(result)
    add(
        "--gpus",
        default="auto",
        metavar="LIST",
        help="GPUs to use: 4-7, or 0,2, or cpu, or auto (%(default)s)",
    )
    add(
        "--share-gpus",
        action="store_true",
        help="take turns on the GPUs with the learner, which has the same option",
    )
    add(
        "--engine",
        metavar="NAME",
        help="engine, overrides the run's rollout.engine, for example hf or random",
    )
    add(
        "--policy",
        metavar="NAME",
        help="policy to serve, overrides the run's rollout.policy (actor)",
    )
    add("--model", metavar="PATH", help="fixed weights to serve, for a policy other than actor")
    place = "folder or HTTP address of snapshots to start from while the learner is unavailable (runs/RUN/snapshots)"
    add("--snapshot", metavar="PLACE", help=place)
    http = f"serve an OpenAI-compatible API on this port ({HTTP_PORT}), 0 for any; write --http=PORT before settings"
    add("--http", nargs="?", const=HTTP_PORT, type=_port, metavar="PORT", help=http)
    add(
        "--interface",
        metavar="NAME",
        help="interface that hubs on other hosts reach, for example eth0 (the broker's)",
    )
    add(
        "--bind",
        metavar="ADDRESS",
        help="the same by its IP address, with a port or without: 10.0.0.2:7000",
    )
    text = "address at which the API listens (broker.bind); beyond loopback it needs --tls-cert, or --insecure"
    add("--http-bind", metavar="ADDRESS", help=text)
    add(
        "--tls-cert",
        metavar="FILE",
        help="TLS certificate of the API, or chain of certificates, in PEM",
    )
    add("--tls-key", metavar="FILE", help="its private key in PEM, which other users cannot read")
    setting = "settings of the section rollout, for example max_running=32"
    add("overrides", nargs="*", metavar="key=value", help=setting)
    return complete(result, EXAMPLES)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the server and return its exit code."""

    def run() -> int:
        options = parser().parse_args(arguments)
        return process.main("rollout", lambda stop: service.run(options, stop))

    return enter(run)


if __name__ == "__main__":
    sys.exit(main())
