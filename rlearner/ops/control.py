"""``rlearner pause``, ``resume``, ``drain``, ``stop``: sets the state that a run's processes follow."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from broker import cli as broker_cli
from broker.contract import wire
from broker.errors import UserError
from broker.jetstream.bus import Bus
from broker.runtime.presence import census
from broker.settings.arguments import broker_words
from broker.system.visible_text import visible
from learner.run_folder import broker_address, find_run

STATES: Final = {"pause": "paused", "resume": "running", "drain": "draining", "stop": "stopped"}


async def set_state(options: argparse.Namespace) -> int:
    """Publish the desired state and return the exit code."""
    run, url = _target(options)
    arguments = ["control", STATES[options.command], "--run", run, *broker_words(url), "--reason", options.reason]
    arguments += ["--connect-deadline", str(options.connect_deadline)]
    await broker_cli.operate(broker_cli.parser().parse_args(arguments))
    if options.command == "drain":
        bus = await Bus.connect(url, run, name=f"operator-{os.getpid()}", deadline_s=options.connect_deadline)
        try:
            print("\n".join(map(visible, drain_lines(run, await census(bus, run)))))
        finally:
            await bus.close()
    return 0


def drain_lines(run: str, present: Sequence[wire.Presence]) -> list[str]:
    """Return what each process of a draining run does: which exit, and which stay and why."""
    lines = []
    for one in present:
        match one.role:
            case "learner":
                does = "writes a checkpoint of the last completed step, then exits"
            case "envhub":
                busy = f"{one.running} of {one.slots} slots"
                does = f"starts no new episodes, finishes the running ones ({busy}), then exits"
            case _:
                does = f"stays, because hubs still need it and the run may continue; `rlearner stop {run}` stops it"
        lines.append(f"  {one.role} {one.id}: {does}")
    return lines or ["  no process is running"]


def _target(options: argparse.Namespace) -> tuple[str, str]:
    """Return name and broker of the run, which need not have a folder on this machine."""
    try:
        place = find_run(options.run_name, options.dir)
    except UserError:
        if "/" in options.run_name:
            raise
        return options.run_name, broker_address(options.broker, Path(options.dir) / options.run_name)
    return place.name, broker_address(options.broker, place.folder)
