"""Arguments of ``rlearner eval``. Imports nothing heavy."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path
from typing import Any

from broker.arguments import add_config
from broker.process import Stop, main


def add_parser(subparsers: Any) -> None:
    """Add ``eval MODEL CONFIG [key=value …]``."""
    parser = subparsers.add_parser(
        "eval",
        help="measure a model on the held-out tasks of a configuration",
        description="Measure a model on the held-out tasks of a configuration, through the processes that a run would use. Tasks and seeds "
        "are those that a run of it measures itself on; eval.tasks, eval.group_size and eval.temperature say how many and how.",
    )
    parser.add_argument("model", metavar="MODEL", help="folder or hub name, for example a checkpoint of a run")
    add_config(parser, setting="eval.tasks=512")
    parser.add_argument("--gpus", default="auto", metavar="LIST", help="GPUs for generation: 4-7, or 0,2, or cpu, or auto (%(default)s)")
    parser.add_argument("--json", action="store_true", help="one JSON object in place of text")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run it; the exit code."""

    async def body(stop: Stop) -> None:
        from broker.runspec import load, validate
        from learner.doctor.lacking import refuse_fleet
        from learner.evaluate.run import evaluate
        from learner.evaluate.tasks import fitted
        from learner.prepare import name_run

        asked = name_run(load(arguments.config, arguments.overrides), f"eval-{Path(arguments.config).stem}")
        config = fitted(validate(asked))
        await asyncio.to_thread(refuse_fleet, config)
        await evaluate(config, arguments.model, stop, gpus=arguments.gpus, as_json=arguments.json)

    return main("eval", body)
