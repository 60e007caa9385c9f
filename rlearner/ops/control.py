"""``rlearner pause``, ``resume``, ``drain``, ``stop``: set the state that processes follow."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from broker.contract import wire
from broker.errors import UserError
from broker.jetstream.bus import Bus
from broker.operations.runs import State, set_desired
from broker.runtime.presence import census
from broker.settings.run_address import broker_address
from broker.system.visible_text import visible, visible_json
from learner.run_folder import find_run

STATES: Final[dict[str, State]] = {
    "pause": "paused",
    "resume": "running",
    "drain": "draining",
    "stop": "stopped",
}


async def set_state(options: argparse.Namespace) -> int:
    """Publish the desired state and return the exit code."""
    run, url = _name_and_broker(options)
    state = STATES[options.command]
    bus = await Bus.connect(
        url, run, name=f"operator-{os.getpid()}", deadline_s=options.connect_deadline
    )
    try:
        await set_desired(bus, run, state, options.reason)
        is_drain = options.command == "drain"
        actions = drain_actions(run, await census(bus, run)) if is_drain else []
    finally:
        await bus.close()
    if options.json:
        fields: dict[str, Any] = {"run": run, "state": state, "reason": options.reason}
        if is_drain:
            fields["processes"] = [
                {"role": role, "id": name, "does": action} for role, name, action in actions
            ]
        print(visible_json(fields))
        return 0
    lines = [f"  {role} {name}: {action}" for role, name, action in actions]
    if is_drain and not lines:
        lines = ["  no process is running"]
    print("\n".join(map(visible, [f"{run}: {state}", *lines])))
    return 0


def drain_actions(run: str, present: Sequence[wire.Presence]) -> list[tuple[str, str, str]]:
    """Return role and id of each process of a draining run, and what it does."""
    actions = []
    for presence in present:
        match presence.role:
            case "learner":
                action = "writes a checkpoint of the last completed step, then exits"
            case "envhub":
                busy = f"{presence.running} of {presence.slots} slots"
                action = f"starts no new episodes, finishes the running ones ({busy}), then exits"
            case _:
                action = (
                    "stays, because hubs still need it and the run may continue; "
                    f"`rlearner stop {run}` stops it"
                )
        actions.append((presence.role, presence.id, action))
    return actions


def _name_and_broker(options: argparse.Namespace) -> tuple[str, str]:
    """Return name and broker of the run, which need not have a folder on this machine."""
    try:
        place = find_run(options.run_name, options.dir)
    except UserError:
        # A path must exist; a name may be of a run on another machine.
        if "/" in options.run_name:
            raise
        return options.run_name, broker_address(
            options.broker, Path(options.dir) / options.run_name
        )
    return place.name, broker_address(options.broker, place.folder)
