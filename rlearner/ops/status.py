"""``rlearner status``: shows the state of a run, from the broker and from the run's folder."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import shutil
import sys
import textwrap
import time
from collections.abc import Iterable, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any, Final

from broker.contract import wire
from broker.contract.streams import CONTROL, MEMBERS, RUNS, STREAMS, WEIGHTS, StreamKind
from broker.errors import UserError
from broker.identity.key_folder import BrokerUser
from broker.jetstream.bus import Bus
from broker.nats.nats_errors import ApiError
from broker.runtime.presence import CENSUS_S, census, display_name
from broker.system.visible_text import visible
from learner.checkpoints import checkpoint
from learner.credit import ledger_file, ledger_segments
from learner.reporting.metrics import damage, read_lines
from learner.reporting.training_signals import RECENT, active_warnings
from learner.run_folder import STARTING, UNKNOWN, connect_run, find_run
from rlearner.advise.advice import advise
from rlearner.advise.fit import NotFitted

IDLE: Final = ("trainer/idle_ratio", "rollouter/idle_ratio")
SHOWN: Final = ("reward/mean", "env/success_rate", "staleness/max", "perf/tokens_per_s", *IDLE)
TICKETS: Final = ("issued", "trained", "filtered", "dropped", "dead", "open", "duplicate")
HISTORY: Final = 80  # lines that the bottleneck is found in
DAY_S: Final = 86_400.0
COLUMN: Final = 15  # start of the second column
LOAD: Final = ("slots", "running", "waiting")
PROCESS: Final = (
    "role",
    "id",
    "host",
    "pid",
    "state",
    "policy",
    "epoch",
    "policy_version",
    *LOAD,
    "problem",
    "said",
    "job",
)


async def show_status(options: argparse.Namespace) -> int:
    """Print the status and return the exit code."""
    place = find_run(options.run_name, options.dir)
    found: dict[str, Any] = {
        "run": place.name,
        "folder": str(place.folder),
        **on_disk(place.folder, place.config),
    }
    async with connect_run(options, place.name, place.folder) as (bus, why):
        found |= await on_broker(bus) if bus else {"broker": None, "broker_error": why}
        if bus and (keys := bus.link.login.keys) is not None:
            found["warnings"] += expiring_tokens(keys.users(), place.name, time.time())
    # takes a second
    found["advice"] = await asyncio.to_thread(advice_on_disk, place.folder, place.config)
    if options.json:
        print(json.dumps(found))
    else:
        lines = text_of(found, time.time())
        lines = wrapped(lines, shutil.get_terminal_size().columns) if sys.stdout.isatty() else lines
        print(visible("\n".join(lines), newlines=True))
    return 0


def on_disk(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the status in the run's folder: steps, newest metrics, checkpoints, tickets."""
    metrics = folder / "metrics.jsonl"
    rows = [_numbers(row) for row in read_lines(metrics)]
    last = rows[-1] if rows else {}
    lines, problem = ledger_segments.read_newest(folder / ledger_segments.FOLDER)
    counts, dead = ledger_file.final_counts(lines)
    return {
        "step": last.get("step", 0),
        "steps": config["train"]["steps"],
        "step_at": last.get("time"),
        "figures": {name: last[name] for name in SHOWN if name in last},
        "warnings": [
            *([damaged] if (damaged := damage(metrics)) else []),
            *active_warnings(rows[-RECENT:]),
        ],
        "tickets": {name: counts[name] for name in TICKETS if name in counts},
        "dead": dead,
        "ledger_file": problem or _state_of(lines),
        "checkpoints": [
            _step_of(path) for path in checkpoint.list_checkpoints(folder / "checkpoints")
        ],
    }


def _numbers(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if isinstance(value, (int, float))}


def advice_on_disk(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the bottleneck and what would change it, or why it is not known."""
    try:
        return advise(read_lines(folder / "metrics.jsonl")[-HISTORY:], config).to_json()
    except NotFitted as error:
        return {"bottleneck": None, "line": f"not known: {error}", "needs_steps": error.steps}
    except (KeyError, TypeError) as error:
        return {
            "bottleneck": None,
            "line": f"not known: config.yaml lacks a setting ({error})",
            "needs_steps": 0,
        }


def _state_of(lines: list[ledger_file.LedgerLine]) -> str:
    if lines and lines[0].state == "unrecorded":
        return f"nothing is recorded of tickets before step {lines[0].step}"
    return "ok" if lines else "none yet"


def _step_of(path: Path) -> int | str:
    try:
        return checkpoint.read_checkpoint(path).step
    except UserError as error:
        return str(error)


def expiring_tokens(users: Iterable[BrokerUser], run: str, now: float) -> list[str]:
    """Return a warning for each token of a run that the broker will refuse within a day."""
    return [
        f"token {user.name} ({user.role}) expires in {_age(user.expires_at - now)}, and its processes end then; "
        f"rlearner renew {user.name} prolongs it"
        for user in users
        if user.name and user.run == run and 0 < user.expires_at - now < DAY_S
    ]


async def on_broker(bus: Bus) -> dict[str, Any]:
    """Return the status in the broker: desired state, processes, queue depths, offered weights."""
    spec = await bus.key_value(RUNS).get(bus.run)
    desired = await bus.key_value(CONTROL).get(bus.run)
    heard = await census(bus, bus.run)
    processes = [{name: getattr(one, name) for name in PROCESS} for one in heard]
    is_entered = bool(await bus.key_value(MEMBERS).values(f"{bus.run}.learner"))
    queues: dict[str, Any] = {}
    for stream in STREAMS:
        if stream.kind in (StreamKind.WORK_QUEUE, StreamKind.LOG):
            try:
                depth = await bus.depth(stream)
                if stream.kind is StreamKind.LOG:
                    depth = {"kept": depth[""], "written": await bus.last_seq(stream)}
                queues[stream.name] = depth
            except ApiError as error:
                queues[stream.name] = {"error": error.description}
    return {
        "broker": bus.link.where,
        "epoch": spec[0].epoch if spec and isinstance(spec[0], wire.RunSpec) else 0,
        "desired": desired[0].state
        if desired and isinstance(desired[0], wire.DesiredState)
        else "running",
        "reason": desired[0].reason
        if desired and isinstance(desired[0], wire.DesiredState)
        else "",
        "learner": "running"
        if any(one.role == "learner" for one in heard)
        else "silent"
        if is_entered
        else "none",
        "processes": sorted(processes, key=lambda one: (one["role"], one["id"])),
        "queues": queues,
        "weights": await _offered(bus),
    }


async def _offered(bus: Bus) -> dict[str, Any] | None:
    """Return the newest weights offer, None if there never was one."""
    try:
        if not await bus.last_seq(WEIGHTS):
            return None
    except ApiError:
        return None
    async with aclosing(bus.watch_last(WEIGHTS)) as offers:
        async for offer in offers:
            if isinstance(offer, wire.WeightsOffer):
                return {
                    name: getattr(offer, name)
                    for name in ("epoch", "version", "digest", "size_bytes", "carriers")
                }
    return None


def text_of(found: Mapping[str, Any], now: float) -> list[str]:
    """Return the lines of the text output."""
    ago = f", {_age(now - found['step_at'])} ago" if found["step_at"] else ""
    lines = [
        *missing_learner_lines(found),
        f"run {found['run']}: step {found['step']} of {found['steps']}{ago}",
    ]
    if found["broker"] is None:
        lines.append(f"  broker       {found['broker_error']}")
    else:
        reason = f" ({found['reason']})" if found["reason"] else ""
        lines.append(
            f"  broker       {found['broker']}, wants it {found['desired']}{reason}, epoch {found['epoch']}"
        )
    lines.append(f"  tickets      {_listed(found['tickets'].items()) or 'none yet'}")
    if found["dead"]:
        lines.append(f"  dead         {_listed(sorted(found['dead'].items()))}")
    lines.append(f"  figures      {_listed(found['figures'].items(), '.4g') or 'none yet'}")
    if "advice" in found:
        lines.append(f"  bottleneck   {found['advice']['line']}")
    lines += [f"  warning      {text}" for text in found["warnings"]]
    made = ", ".join(map(str, found["checkpoints"])) or "none yet"
    lines.append(f"  checkpoints  {made}; ledger file: {found['ledger_file']}")
    if found["broker"] is None:
        return lines
    if offer := found["weights"]:
        size = f"{offer['size_bytes'] / 2**20:.1f} MiB"
        lines.append(f"  weights      version {offer['version']} of epoch {offer['epoch']}, {size}")
    for name, depth in found["queues"].items():
        lines.append(f"  {name:13}{_listed(sorted(depth.items())) or 'empty'}")
    for one in found["processes"]:
        load = f"{one['running']}/{one['slots']} running, {one['waiting']} waiting"
        version = f", version {one['policy_version']}" if one["policy_version"] >= 0 else ""
        job = f", {one['job']}" if one["job"] else ""
        lines.append(
            f"  {display_name(one['role'], one['id']):28} {one['state']:9} {load}{version}{job}"
        )
        if one["problem"]:
            lines.append(f"  {'':13}{one['problem']}")
        known = [*found["warnings"], *filter(None, [one["problem"]])]
        if one["said"] and not any(text[:100] in one["said"] for text in known):
            lines.append(f"  {'':13}{one['said']}")
    if not found["processes"]:
        lines.append("  no process is running")
    return lines


def _listed(items: Iterable[tuple[str, Any]], form: str = "") -> str:
    return ", ".join(f"{name} {value:{form}}" for name, value in items)


def wrapped(lines: list[str], width: int) -> list[str]:
    """Wrap lines at ``width`` characters where words allow it; continuation lines start at the
    second column.
    """
    indent = " " * COLUMN
    breaking = textwrap.TextWrapper(
        width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return [
        part for line in lines for part in (breaking.wrap(line) if len(line) > width else [line])
    ]


def missing_learner_lines(found: Mapping[str, Any]) -> list[str]:
    """Return one line if no learner is running: that there is none, and how to start it."""
    config = shlex.quote(os.path.relpath(Path(found["folder"], "config.yaml")))
    if found["broker"] is None and found["broker_error"].startswith(STARTING):
        return []
    if found.get("learner", "none") == "none" and found["step"] >= found["steps"]:
        return [f"no learner is running: all {found['steps']} steps are done"]
    if found["broker"] is None and UNKNOWN in found["broker_error"]:
        again = f"`rlearner start {config} --broker URL`"
        return [
            f"no learner is running; {again} starts the run again, with --rebase if the broker has lost its store"
        ]
    if found["broker"] is None:
        again = f"`rlearner up {config}` continues the run where it stopped"
        return [f"no learner was found, because its broker was not: {again}"]
    if found["learner"] == "running":
        return []
    if found["learner"] == "silent":
        died = f"died less than {MEMBERS.ttl_s:g} s ago"
        return [f"the learner has sent nothing for {CENSUS_S:g} s: it is very busy, or {died}"]
    return [
        f"no learner is running; start it again: rlearner start {config} --broker {found['broker']}"
    ]


def _age(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
