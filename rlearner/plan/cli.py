"""Arguments of ``rlearner plan``. Imports nothing heavy."""

from __future__ import annotations

import argparse
from typing import Any

from broker.settings.arguments import add_config, add_json, count, positive


def add_parser(subparsers: Any) -> None:
    """Add ``plan CONFIG [key=value …]``."""
    text = (
        "show which layouts of a run fit a number of GPUs, with the memory of each part; "
        "needs no GPU"
    )
    parser = subparsers.add_parser("plan", help=text, description=text)
    add_config(parser, file="gsm8k", setting="model.path=Qwen/Qwen3-8B")
    parser.add_argument(
        "--gpus", type=count, required=True, metavar="N", help="GPUs of all hosts together"
    )
    text = "memory of one GPU in GiB (%(default)g)"
    parser.add_argument("--gpu-memory", type=positive, default=80.0, metavar="GIB", help=text)
    parser.add_argument(
        "--hosts",
        type=count,
        default=1,
        metavar="N",
        help="hosts with equally many GPUs (%(default)s)",
    )
    parser.add_argument(
        "--plans", type=count, default=3, metavar="N", help="show at most this many (%(default)s)"
    )
    text = (
        "write the first plan to a new folder: plan.yaml, which inherits CONFIG, "
        "and host-0.sh for each host"
    )
    parser.add_argument("--write", metavar="FOLDER", help=text)
    add_json(parser)
    parser.set_defaults(run=run_plan)


def run_plan(options: argparse.Namespace) -> int:
    """Plan and return the exit code.

    Raises:
        UserError: if the configuration is wrong, or nothing fits.
    """
    from rlearner.plan.run import plan_run

    return plan_run(options)
