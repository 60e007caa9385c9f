"""Arguments of ``rlearner up``. Imports nothing heavy."""

from __future__ import annotations

import argparse
import asyncio
import sys
from typing import Any

from broker.process import Stop, main


def add_parser(subparsers: Any) -> None:
    """Add ``up CONFIG [key=value …]``."""
    parser = subparsers.add_parser("up", help="start a whole single-machine fleet, show it live, stop it cleanly")
    parser.add_argument("config", help="YAML file, for example configs/quickstart.yaml")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that win over the file, for example train.steps=50")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run it; the exit code."""

    async def body(stop: Stop) -> None:
        from broker.runspec import load, validate
        from learner.doctor.lacking import line, of_fleet, refuse
        from learner.prepare import name_run

        config = validate(name_run(load(arguments.config, arguments.overrides), arguments.config))
        found = await asyncio.to_thread(of_fleet, config)
        refuse(found)
        for finding in found:
            print(f"warning: {line(finding)}", file=sys.stderr)
        from learner.up.run import up

        overrides = [o for o in arguments.overrides if not o.startswith("run.name=")]
        await up(config, [arguments.config, *overrides, f"run.name={config['run']['name']}"], stop)

    return main("up", body)
