"""Arguments of ``rlearner units``. Imports nothing heavy."""

from __future__ import annotations

import argparse
from typing import Any

from broker.settings.arguments import add_config, add_json, count, positive


def add_parser(subparsers: Any) -> None:
    """Add ``units CONFIG [key=value …]``."""
    text = (
        "print the systemd units of a host of a plan, their environment files, "
        "and the commands that start them"
    )
    parser = subparsers.add_parser("units", help=text, description=text)
    add_config(parser, setting="run.name=lake")
    add = parser.add_argument
    add(
        "--gpus",
        type=count,
        metavar="N",
        help="GPUs of all hosts together, planned as `rlearner plan` does (none)",
    )
    text = "memory of one GPU in GiB (%(default)g)"
    add("--gpu-memory", type=positive, default=80.0, metavar="GIB", help=text)
    text = (
        "hosts with equally many GPUs, each with the address by which the others reach it; "
        "the first has the broker"
    )
    add("--hosts", metavar="NAME=ADDRESS,…", help=f"{text} (one host)")
    add("--host", metavar="NAME", help="whose units (the only one)")
    text = "folder of rlearner's programs on that host (%(default)s)"
    add("--bin", default="/opt/rlearner/bin", metavar="FOLDER", help=text)
    text = (
        "write the files below this folder instead of printing them; "
        "other contents are never overwritten"
    )
    add("--write", metavar="FOLDER", help=text)
    add_json(parser)
    parser.set_defaults(run=run_units)


def run_units(options: argparse.Namespace) -> int:
    """Print or write the units; return the exit code.

    Raises:
        UserError: if the configuration or a host is wrong, nothing fits, or a file holds something
            else.
    """
    from rlearner.units.run import units_run

    return units_run(options)
