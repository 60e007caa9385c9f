"""``rlearner pause``, ``resume``, ``drain``, ``stop``: sets the state that a run's processes
follow.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from broker.contract import wire
from broker.errors import UserError
from broker.jetstream.bus import Bus
from broker.operations.runs import State, set_desired
from broker.runtime.presence import census
from broker.system.visible_text import visible, visible_json
from learner.run_folder import broker_address, find_run

STATES: Final[dict[str, State]] = {
    "pause": "paused",
    "resume": "running",
    "drain": "draining",
    "stop": "stopped",
}


async def set_state(options: argparse.Namespace) -> int:
    """Publish the desired state and return the exit code."""
    run, url = _target(options)
    state = STATES[options.command]
    bus = await Bus.connect(
        url, run, name=f"operator-{os.getpid()}", deadline_s=options.connect_deadline
    )
    try:
        await set_desired(bus, run, state, options.reason)
        is_drain = options.command == "drain"
        doing = drain_actions(run, await census(bus, run)) if is_drain else []
    finally:
        await bus.close()
    if options.json:
        processes = [{"role": role, "id": name, "does": does} for role, name, does in doing]
        found = {"run": run, "state": state, "reason": options.reason}
        print(visible_json(found | ({"processes": processes} if is_drain else {})))
        return 0
    lines = [f"  {role} {name}: {does}" for role, name, does in doing]
    if is_drain and not lines:
        lines = ["  no process is running"]
    print("\n".join(map(visible, [f"{run}: {state}", *lines])))
    return 0


def drain_actions(run: str, present: Sequence[wire.Presence]) -> list[tuple[str, str, str]]:
    """Return role and id of each process of a draining run, and what it does: which exit, and which
    stay and why.
    """
    found = []
    for one in present:
        match one.role:
            case "learner":
                does = "writes a checkpoint of the last completed step, then exits"
            case "envhub":
                busy = f"{one.running} of {one.slots} slots"
                does = f"starts no new episodes, finishes the running ones ({busy}), then exits"
            case _:
                does = f"stays, because hubs still need it and the run may continue; `rlearner stop {run}` stops it"
        found.append((one.role, one.id, does))
    return found


def _target(options: argparse.Namespace) -> tuple[str, str]:
    """Return name and broker of the run, which need not have a folder on this machine."""
    try:
        place = find_run(options.run_name, options.dir)
    except UserError:
        if "/" in options.run_name:
            raise
        return options.run_name, broker_address(
            options.broker, Path(options.dir) / options.run_name
        )
    return place.name, broker_address(options.broker, place.folder)
