"""``rlearner pause|resume|drain|stop``: what every process of the run follows."""

from __future__ import annotations

import argparse
from typing import Final

from broker import cli as broker_cli
from broker.errors import UserError
from learner.ops.place import address, find

STATES: Final = {"pause": "paused", "resume": "running", "drain": "draining", "stop": "stopped"}


async def set_state(options: argparse.Namespace) -> int:
    """Put the state where every process sees it; the exit code."""
    run, url = _target(options)
    arguments = ["control", STATES[options.command], "--run", run, "--broker", url, "--reason", options.reason]
    await broker_cli.operate(broker_cli.parser().parse_args([*arguments, "--connect-deadline", str(options.connect_deadline)]))
    return 0


def _target(options: argparse.Namespace) -> tuple[str, str]:
    """Name and broker of the run; it need not have a folder on this machine."""
    try:
        place = find(options.run_name, options.dir)
    except UserError:
        if "/" in options.run_name:
            raise
        from pathlib import Path

        return options.run_name, address(options.broker, Path(options.dir) / options.run_name)
    return place.name, address(options.broker, place.folder)
