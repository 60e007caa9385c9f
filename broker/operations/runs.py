"""``broker status`` and ``broker control``: show runs, and set the desired state of one."""

from __future__ import annotations

import argparse
import asyncio
from collections import Counter
from typing import Any

from broker.contract import wire
from broker.contract.streams import CONTROL, STREAMS, StreamKind
from broker.errors import UserError
from broker.jetstream.bus import Bus
from broker.nats.nats_errors import ApiError
from broker.runtime.presence import census
from broker.settings.runspec import find_runs
from broker.system.visible_text import visible


async def choose_run(bus: Bus, options: argparse.Namespace) -> None:
    """Set the bus to the run that the options name, or to the only one.

    Raises:
        UserError: if there is no such run, no run at all, or several (names them).
    """
    runs = await find_runs(bus)
    active = [run for run, state in runs.items() if state != "stopped"]
    candidates = [options.run] if options.run else active if len(active) == 1 else list(runs)
    if not runs:
        raise UserError(f"no run on the broker at {bus.link.where}")
    if len(candidates) > 1:
        raise UserError(f"several runs on the broker: {', '.join(sorted(candidates))}; choose one with --run or RL_RUN")
    if candidates[0] not in runs:
        raise UserError(f"no run {candidates[0]!r} on the broker; there is {', '.join(sorted(runs))}")
    bus.run = candidates[0]


async def status(bus: Bus, options: argparse.Namespace) -> None:
    """``broker status``: print every run, or the one that the options name."""
    runs = await find_runs(bus)
    if options.run:
        await choose_run(bus, options)
        runs = {bus.run: runs[bus.run]}
    print(f"broker at {bus.link.where}: {len(runs)} run{'' if len(runs) == 1 else 's'}")
    heard = await asyncio.gather(*(census(bus, run) for run in sorted(runs)))
    for (run, state), alive in zip(sorted(runs.items()), heard, strict=True):
        bus.run = run
        roles = Counter(one.role for one in alive)
        processes = ", ".join(f"{count} {role}" for role, count in sorted(roles.items()))
        print(visible(f"{run}: {state}; {processes or 'no processes'}"))
        for stream in STREAMS:
            if stream.kind in (StreamKind.WORK_QUEUE, StreamKind.LOG):
                print(visible(f"  {stream.name:12}{await _depth(bus, stream)}"))


async def _depth(bus: Bus, stream: Any) -> str:
    try:
        depth = await bus.depth(stream)
        if stream.kind is StreamKind.LOG:
            return f"{depth.get('', 0)} kept, {await bus.last_seq(stream)} written"
    except ApiError as error:
        return f"missing: {error.description}"
    return ", ".join(f"{key} {count}" for key, count in sorted(depth.items())) or "0"


async def control(bus: Bus, options: argparse.Namespace) -> None:
    """``broker control``: store the desired state, which every process follows.

    Raises:
        UserError: if the run is stopped, so that its processes have ended.
    """
    await choose_run(bus, options)
    states = bus.key_value(CONTROL)
    found = await states.get(bus.run)
    if found is not None and isinstance(found[0], wire.DesiredState) and found[0].state == "stopped" != options.state:
        why = f" ({found[0].reason})" if found[0].reason else ""
        again = f"start its learner again: rlearner start … run.name={bus.run}"
        raise UserError(f"run {bus.run} is stopped{why}, so it cannot be {options.state}; {again}")
    await states.put(bus.run, wire.DesiredState(state=options.state, reason=options.reason))
    print(f"{bus.run}: {options.state}")
