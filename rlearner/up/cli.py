"""Arguments of ``rlearner up``. Imports nothing heavy."""

from __future__ import annotations

import argparse
import asyncio
from typing import Any

from broker.runtime.process import Stop, add_metrics_options, main
from broker.settings.arguments import add_config, add_json, port


def add_parser(subparsers: Any) -> None:
    """Add ``up CONFIG [key=value …]``."""
    text = "start all processes of a run on this machine, show progress, stop them cleanly"
    parser = subparsers.add_parser("up", help=text, description=text)
    add_config(parser)
    add_force(parser)
    add_share_gpus(parser)
    text = "if the broker's store is lost, count the open tickets as dead and continue"
    parser.add_argument("--rebase", action="store_true", help=text)
    text = (
        "address of the broker; other hosts reach one that is not loopback, "
        "with TLS and a join token (%(default)s)"
    )
    parser.add_argument("--bind", metavar="ADDRESS", default="127.0.0.1", help=text)
    parser.add_argument(
        "--port", type=port, default=0, help="port of the broker, 0 for any (%(default)s)"
    )
    add_json(
        parser,
        "print one JSON object per line instead of the live view: each step, event and the result",
    )
    add_metrics_options(parser, text="of the learner")
    parser.set_defaults(run=run_up)


def add_force(parser: argparse.ArgumentParser) -> None:
    """Add ``--force``, shared by ``up`` and ``start``."""
    text = (
        "continue a run even if model.path has changed (same shapes and tokenizer), "
        "or none of its domains is left"
    )
    parser.add_argument("--force", action="store_true", help=text)


def add_share_gpus(parser: argparse.ArgumentParser) -> None:
    """Add ``--share-gpus``, shared by ``up`` and ``start``."""
    text = (
        "learner and rollout servers take turns on the same GPUs, or in the same memory without any"
    )
    parser.add_argument("--share-gpus", action="store_true", help=text)


def run_up(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit code."""

    async def body(stop: Stop) -> int:
        from broker.settings.runspec import check_settings, load
        from learner.gpu_selection import with_weights_on_host
        from learner.prepare import exit_code, name_run
        from rlearner.doctor.preflight import require_fleet
        from rlearner.up.output import Output
        from rlearner.up.run import is_completed, run_processes

        config = name_run(load(arguments.config, arguments.overrides), arguments.config)
        if arguments.share_gpus:
            config = with_weights_on_host(config)
        settings = check_settings(config)
        say = Output(as_json=arguments.json)
        if await is_completed(settings, say):
            return 0
        await asyncio.to_thread(require_fleet, settings)
        # The learner gets the name that was chosen here, which may be generated from the time.
        overrides = [text for text in arguments.overrides if not text.startswith("run.name=")]
        start_args = [arguments.config, *overrides, f"run.name={settings.run.name}"]
        if arguments.metrics_port is not None:
            start_args += ["--metrics-port", str(arguments.metrics_port)]
            start_args += ["--metrics-bind", arguments.metrics_bind]
        await run_processes(
            settings,
            start_args,
            stop,
            say,
            force=arguments.force,
            rebase=arguments.rebase,
            share_gpus=arguments.share_gpus,
            listen=(arguments.bind, arguments.port),
        )
        return exit_code(settings)

    return main("up", body)
