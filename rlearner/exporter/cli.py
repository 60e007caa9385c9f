"""Arguments of ``rlearner exporter``. Imports nothing heavy."""

from __future__ import annotations

import argparse
from typing import Any, Final

from broker.runtime.process import Stop, add_metrics_options, main
from broker.settings.arguments import add_broker, positive
from broker.system import logs
from broker.system.entry import EXIT_STOPPED
from learner.run_folder import add_run_options

PORT: Final = 9464


def add_parser(subparsers: Any) -> None:
    """Add ``exporter RUN``."""
    text = "serve the figures of a whole run for Prometheus, read through its broker"
    parser = subparsers.add_parser("exporter", help=text, description=text)
    add_run_options(parser)
    add_broker(parser, is_noted=True)
    text = "token for an observer, from `rlearner invite observer`; - reads standard input"
    parser.add_argument("--join", metavar="FILE", help=text)
    text = "give up if no broker answers in time (never)"
    parser.add_argument("--connect-deadline", metavar="SECONDS", type=positive, help=text)
    add_metrics_options(parser, default=PORT, text="of the run")
    logs.add_options(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the command and return its exit code."""

    async def body(stop: Stop) -> None:
        from rlearner.exporter.service import export

        await export(options, stop)

    return main("exporter", body, stopped_code=EXIT_STOPPED)
