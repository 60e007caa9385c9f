"""``broker status`` and ``broker control``: show runs, and set the desired state of one."""

from __future__ import annotations

import argparse
import asyncio
from collections import Counter
from typing import Any, Literal

from broker.contract import wire
from broker.contract.streams import CONTROL, STREAMS, Stream, StreamKind
from broker.errors import UserError
from broker.jetstream.bus import Bus
from broker.nats.nats_errors import ApiError
from broker.runtime.presence import census
from broker.settings.runspec import find_runs
from broker.system.visible_text import visible, visible_json

State = Literal["running", "paused", "draining", "stopped"]


async def choose_run(bus: Bus, run: str | None) -> None:
    """Set the bus to the run of that name, or to the only one.

    Raises:
        UserError: if there is no such run, no run at all, or several (names them).
    """
    runs = await find_runs(bus)
    active = [name for name, state in runs.items() if state != "stopped"]
    candidates = [run] if run else active if len(active) == 1 else list(runs)
    if not runs:
        raise UserError(f"no run on the broker at {bus.link.where}")
    if len(candidates) > 1:
        raise UserError(
            f"several runs on the broker: {', '.join(sorted(candidates))}; choose one with --run or RL_RUN"
        )
    if candidates[0] not in runs:
        raise UserError(
            f"no run {candidates[0]!r} on the broker; there is {', '.join(sorted(runs))}"
        )
    bus.run = candidates[0]


async def status(bus: Bus, options: argparse.Namespace) -> None:
    """``broker status``: print every run, or the one that the options name."""
    runs = await find_runs(bus)
    if options.run:
        await choose_run(bus, options.run)
        runs = {bus.run: runs[bus.run]}
    members_by_run = await asyncio.gather(*(census(bus, run) for run in sorted(runs)))
    summaries: list[dict[str, Any]] = []
    for (run, state), members in zip(sorted(runs.items()), members_by_run, strict=True):
        bus.run = run
        streams = {
            stream.name: await _depth(bus, stream)
            for stream in STREAMS
            if stream.kind in (StreamKind.WORK_QUEUE, StreamKind.LOG)
        }
        roles = Counter(summary.role for summary in members)
        summaries.append(
            {
                "run": run,
                "state": state,
                "processes": dict(sorted(roles.items())),
                "streams": streams,
            }
        )
    if options.json:
        print(visible_json({"broker": bus.link.where, "runs": summaries}))
        return
    logs = {stream.name for stream in STREAMS if stream.kind is StreamKind.LOG}
    print(f"broker at {bus.link.where}: {len(runs)} run{'' if len(runs) == 1 else 's'}")
    for summary in summaries:
        processes = ", ".join(f"{count} {role}" for role, count in summary["processes"].items())
        print(visible(f"{summary['run']}: {summary['state']}; {processes or 'no processes'}"))
        for name, depth in summary["streams"].items():
            print(visible(f"  {name:12}{_depth_text(depth, is_log=name in logs)}"))


async def _depth(bus: Bus, stream: Stream) -> dict[str, Any]:
    """Return a queue's messages by key, a log's ``kept`` and ``written``, or the ``error``."""
    try:
        depth = await bus.depth(stream)
        if stream.kind is StreamKind.LOG:
            return {"kept": depth.get("", 0), "written": await bus.last_seq(stream)}
    except ApiError as error:
        return {"error": error.description}
    return dict(sorted(depth.items()))


def _depth_text(depth: dict[str, Any], *, is_log: bool) -> str:
    if isinstance(depth.get("error"), str):  # a number: of a domain of that name
        return f"missing: {depth['error']}"
    if is_log:
        return f"{depth['kept']} kept, {depth['written']} written"
    return ", ".join(f"{key} {count}" for key, count in depth.items()) or "0"


async def control(bus: Bus, options: argparse.Namespace) -> None:
    """``broker control``: store the desired state, which every process follows."""
    await set_desired(bus, options.run, options.state, options.reason)
    desired = {"run": bus.run, "state": options.state, "reason": options.reason}
    print(visible_json(desired) if options.json else f"{bus.run}: {options.state}")


async def set_desired(bus: Bus, run: str | None, state: State, reason: str) -> None:
    """Store the desired state of a run, or of the only one, and set the bus to it.

    Raises:
        UserError: if the run is stopped, so that its processes have ended.
    """
    await choose_run(bus, run)
    states = bus.key_value(CONTROL)
    entry = await states.get(bus.run)
    if (
        entry is not None
        and isinstance(entry[0], wire.DesiredState)
        and entry[0].state == "stopped" != state
    ):
        stop_reason = f" ({entry[0].reason})" if entry[0].reason else ""
        remedy = f"start its learner again: rlearner start … run.name={bus.run}"
        raise UserError(f"run {bus.run} is stopped{stop_reason}, so it cannot be {state}; {remedy}")
    await states.put(bus.run, wire.DesiredState(state=state, reason=reason))
