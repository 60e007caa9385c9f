"""Arguments of ``rlearner doctor``. Imports nothing heavy."""

from __future__ import annotations

import argparse
from typing import Any

from broker.settings.arguments import add_config, add_json


def add_parser(subparsers: Any) -> None:
    """Add ``doctor [CONFIG] [key=value …]``."""
    text = (
        "check this machine against a configuration and name a fix for each gap; "
        "exit code 1 if something is missing"
    )
    parser = subparsers.add_parser("doctor", help=text, description=text)
    add_config(parser, needed=False)
    add_json(parser)
    parser.set_defaults(run=run_doctor)


def run_doctor(options: argparse.Namespace) -> int:
    """Print all findings and return the exit code.

    Raises:
        UserError: if the configuration itself is wrong.
    """
    from rlearner.doctor.examine import examine_machine
    from rlearner.doctor.findings import as_json, exit_code, format_table

    findings = examine_machine(options.config, options.overrides)
    print((as_json if options.json else format_table)(findings, options.config or "this machine"))
    return exit_code(findings)
