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
from broker.contract.wire import PlainSettings
from broker.errors import UserError
from broker.identity.key_folder import BrokerUser
from broker.jetstream.bus import Bus
from broker.nats.nats_errors import ApiError
from broker.runtime.presence import CENSUS_S, census, display_name
from broker.settings.run_address import is_held, noted_address, private_addresses
from broker.system.visible_text import visible
from broker.telemetry.operator_profile import FOLDER
from learner.checkpoints import checkpoint
from learner.credit import ledger_file, ledger_segments
from learner.reporting.metrics import describe_damage, read_lines
from learner.reporting.training_signals import RECENT, active_warnings
from learner.run_folder import OFFLINE_LOCK, STARTING, UNKNOWN, connect_run, find_run
from rlearner.advise.advice import advise
from rlearner.advise.fit import NotFitted, SettingMissing, stored_settings
from rlearner.ops.run_kinds import RESULT, run_kind

IDLE: Final = ("trainer/idle_ratio", "rollouter/idle_ratio")
OFFLINE_FIGURES: Final = ("train/loss", "eval/loss", "train/accuracy", "eval/accuracy")
FIGURES: Final = (
    "reward/mean",
    "env/success_rate",
    "staleness/max",
    "perf/tokens_per_s",
    *IDLE,
    *OFFLINE_FIGURES,
)
TICKETS: Final = ("issued", "trained", "filtered", "dropped", "dead", "open", "duplicate")
# Newest lines in which the bottleneck is looked for, so that a long run is not read whole.
HISTORY: Final = 80
DAY_S: Final = 86_400.0
# Start of the second column.
COLUMN: Final = 15
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
    status: dict[str, Any] = {
        "run": place.name,
        "folder": str(place.folder),
        **on_disk(place.folder, place.steps),
    }
    status["kind"] = run_kind(place)
    if status["kind"] == "training":
        async with connect_run(options, place.name, place.folder) as (bus, problem):
            if bus is None:
                status |= {"broker": None, "broker_error": problem}
            else:
                status |= await on_broker(bus)
                if (keys := bus.link.login.keys) is not None:
                    status["warnings"] += expiring_tokens(keys.users(), place.name, time.time())
        # In a thread, because the simulation takes a second.
        status["advice"] = await asyncio.to_thread(advice_on_disk, place.folder, place.config)
    else:
        status |= {"broker": None, "broker_error": "none"}
    if options.json:
        print(json.dumps(status))
        return 0
    lines = text_of(status, time.time())
    if sys.stdout.isatty():
        lines = wrap_lines(lines, shutil.get_terminal_size().columns)
    print(visible("\n".join(lines), newlines=True))
    return 0


def on_disk(folder: Path, steps: int) -> dict[str, Any]:
    """Return the status in the run's folder: steps, newest metrics, checkpoints, tickets."""
    metrics = folder / "metrics.jsonl"
    rows = [_numeric_values(row) for row in read_lines(metrics)]
    last = rows[-1] if rows else {}
    lines, problem = ledger_segments.read_newest(folder / ledger_segments.FOLDER)
    counts, dead = ledger_file.final_counts(lines)
    warnings = list(active_warnings(rows[-RECENT:]))
    if damaged := describe_damage(metrics):
        warnings.insert(0, damaged)
    return {
        "step": last.get("step", 0),
        "steps": steps,
        "step_at": last.get("time"),
        "figures": {name: last[name] for name in FIGURES if name in last},
        "warnings": warnings,
        "tickets": {name: counts[name] for name in TICKETS if name in counts},
        "dead": dead,
        "ledger_file": problem or _ledger_state(lines),
        "profile": profile_files(folder),
        "checkpoints": [
            _checkpoint_step(path) for path in checkpoint.list_checkpoints(folder / "checkpoints")
        ],
    }


def _numeric_values(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if isinstance(value, (int, float))}


def advice_on_disk(folder: Path, config: PlainSettings) -> dict[str, Any]:
    """Return the bottleneck and what would change it, or why it is not known."""
    try:
        settings = stored_settings(config)
        return advise(read_lines(folder / "metrics.jsonl")[-HISTORY:], settings).to_json()
    except NotFitted as error:
        return {"bottleneck": None, "line": f"not known: {error}", "needs_steps": error.steps}
    except SettingMissing as error:
        return {
            "bottleneck": None,
            "line": f"not known: config.yaml lacks a setting ({error})",
            "needs_steps": 0,
        }


def _ledger_state(lines: list[ledger_file.LedgerLine]) -> str:
    if lines and lines[0].state == "unrecorded":
        return f"nothing is recorded of tickets before step {lines[0].step}"
    return "ok" if lines else "none yet"


def profile_files(folder: Path) -> list[str]:
    """Return the traces and tables of ``train.profile``, relative to the working folder."""
    files = [*(folder / FOLDER).glob("*.txt"), *(folder / FOLDER).glob("*.json.gz")]
    return [os.path.relpath(file) for file in sorted(files) if not file.name.startswith(".")]


def _checkpoint_step(path: Path) -> int | str:
    try:
        return checkpoint.read_checkpoint(path).step
    except UserError as error:
        return str(error)


def expiring_tokens(users: Iterable[BrokerUser], run: str, now: float) -> list[str]:
    """Return a warning for each token of a run that the broker will refuse within a day."""
    return [
        f"token {user.name} ({user.role}) expires in {_format_age(user.expires_at - now)}, "
        f"and its processes end then; rlearner renew {user.name} prolongs it"
        for user in users
        if user.name and user.run == run and 0 < user.expires_at - now < DAY_S
    ]


async def on_broker(bus: Bus) -> dict[str, Any]:
    """Return the status in the broker: desired state, processes, queue depths, offered weights."""
    spec = await bus.key_value(RUNS).get(bus.run)
    desired = await bus.key_value(CONTROL).get(bus.run)
    # Without an entry the processes run.
    state = wire.DesiredState(state="running")
    if desired and isinstance(desired[0], wire.DesiredState):
        state = desired[0]
    census_rows = [
        {name: getattr(presence, name) for name in PROCESS}
        for presence in await census(bus, bus.run)
    ]
    learner = "none"
    if any(row["role"] == "learner" for row in census_rows):
        learner = "running"
    # Its entry outlives a learner that sends nothing for a while.
    elif await bus.key_value(MEMBERS).values(f"{bus.run}.learner"):
        learner = "silent"
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
        "desired": state.state,
        "reason": state.reason,
        "learner": learner,
        "processes": sorted(census_rows, key=lambda row: (row["role"], row["id"])),
        "queues": queues,
        "weights": await _newest_offer(bus),
    }


async def _newest_offer(bus: Bus) -> dict[str, Any] | None:
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


def text_of(status: Mapping[str, Any], now: float) -> list[str]:
    """Return the lines of the text output."""
    head = f"run {status['run']}: step {status['step']} of {status['steps']}"
    if status["step_at"]:
        head += f", {_format_age(now - status['step_at'])} ago"
    if status.get("kind", "training") != "training":
        return _lines_without_fleet(status, head)
    # The most important line comes first.
    lines = [*missing_learner_lines(status), head]
    if status["broker"] is None:
        lines.append(f"  broker       {status['broker_error']}")
    else:
        wish = f"wants it {status['desired']}"
        if status["reason"]:
            wish += f" ({status['reason']})"
        lines.append(f"  broker       {status['broker']}, {wish}, epoch {status['epoch']}")
    lines.append(f"  tickets      {_format_pairs(status['tickets'].items()) or 'none yet'}")
    if status["dead"]:
        lines.append(f"  dead         {_format_pairs(sorted(status['dead'].items()))}")
    lines.append(f"  figures      {_format_pairs(status['figures'].items(), '.4g') or 'none yet'}")
    if "advice" in status:
        lines.append(f"  bottleneck   {status['advice']['line']}")
    lines += [f"  warning      {text}" for text in status["warnings"]]
    checkpoints = ", ".join(map(str, status["checkpoints"])) or "none yet"
    lines.append(f"  checkpoints  {checkpoints}; ledger file: {status['ledger_file']}")
    if status.get("profile"):
        lines.append(f"  profile      {', '.join(status['profile'])}")
    if status["broker"] is None:
        return lines
    if offer := status["weights"]:
        size = f"{offer['size_bytes'] / 2**20:.1f} MiB"
        lines.append(f"  weights      version {offer['version']} of epoch {offer['epoch']}, {size}")
    for name, depth in status["queues"].items():
        lines.append(f"  {name:13}{_format_pairs(sorted(depth.items())) or 'empty'}")
    for process in status["processes"]:
        lines += _process_lines(process, status["warnings"])
    if not status["processes"]:
        lines.append("  no process is running")
    return lines


def _lines_without_fleet(status: Mapping[str, Any], head: str) -> list[str]:
    """Return the lines of training from data, or of an evaluation."""
    folder = Path(status["folder"])
    result = os.path.relpath(folder / RESULT)
    if status["kind"] == "evaluation":
        return [f"run {status['run']}: an evaluation, which is over; its result is in {result}"]
    lines = [head]
    is_over = status["step"] >= status["steps"]
    if not is_over and not is_held(folder, OFFLINE_LOCK):
        config = shlex.quote(os.path.relpath(folder / "config.yaml"))
        command = f"`rlearner {status['kind']} {config}`"
        lines.insert(0, f"nothing trains it: {command} continues the run where it stopped")
    lines.append(f"  figures      {_format_pairs(status['figures'].items(), '.4g') or 'none yet'}")
    lines += [f"  warning      {text}" for text in status["warnings"]]
    lines.append(f"  checkpoints  {', '.join(map(str, status['checkpoints'])) or 'none yet'}")
    return lines


def _process_lines(process: Mapping[str, Any], warnings: list[str]) -> list[str]:
    """Return the lines of one process, without those of its log that ``warnings`` has."""
    name = display_name(process["role"], process["id"])
    load = f"{process['running']}/{process['slots']} running, {process['waiting']} waiting"
    line = f"  {name:28} {process['state']:9} {load}"
    if process["policy_version"] >= 0:
        line += f", version {process['policy_version']}"
    if process["job"]:
        line += f", {process['job']}"
    lines = [line]
    reported = list(warnings)
    if process["problem"]:
        lines.append(f"  {'':13}{process['problem']}")
        reported.append(process["problem"])
    # The log adds its own words around a text, and may cut it.
    if process["said"] and not any(text[:100] in process["said"] for text in reported):
        lines.append(f"  {'':13}{process['said']}")
    return lines


def _format_pairs(items: Iterable[tuple[str, Any]], form: str = "") -> str:
    return ", ".join(f"{name} {value:{form}}" for name, value in items)


def wrap_lines(lines: list[str], width: int) -> list[str]:
    """Wrap lines at ``width`` characters, between words; the rest starts at the second column."""
    wrapper = textwrap.TextWrapper(
        width, subsequent_indent=" " * COLUMN, break_long_words=False, break_on_hyphens=False
    )
    parts = []
    for line in lines:
        # A line that fits is left alone, as wrapping would drop its inner spaces.
        parts += wrapper.wrap(line) if len(line) > width else [line]
    return parts


def missing_learner_lines(status: Mapping[str, Any]) -> list[str]:
    """Return one line if no learner is running: that there is none, and how to start it."""
    config = shlex.quote(os.path.relpath(Path(status["folder"], "config.yaml")))
    # The learner runs already, and has only no broker yet.
    if status["broker"] is None and status["broker_error"].startswith(STARTING):
        return []
    if status.get("learner", "none") == "none" and status["step"] >= status["steps"]:
        return [f"no learner is running: all {status['steps']} steps are done"]
    folder = Path(status["folder"])
    is_unknown = status["broker"] is None and UNKNOWN in status["broker_error"]
    if is_unknown and is_held(folder):
        return ["no learner is running yet: `rlearner up` starts it"]
    noted = noted_address(folder)
    if is_unknown and noted not in private_addresses(folder):
        # Not --rebase: only a learner finds out whether the broker has lost the run's streams.
        command = f"`rlearner start {config} --broker {noted or 'URL'}`"
        return [
            f"no learner was found: {command} continues the run with its broker; "
            "--broker names another one to this command"
        ]
    if status["broker"] is None:
        command = f"`rlearner up {config}`"
        return [
            "no learner was found, because its broker was not: "
            f"{command} continues the run where it stopped"
        ]
    if status["learner"] == "running":
        return []
    if status["learner"] == "silent":
        died = f"died less than {MEMBERS.ttl_s:g} s ago"
        return [f"the learner has sent nothing for {CENSUS_S:g} s: it is very busy, or {died}"]
    command = f"rlearner start {config} --broker {status['broker']}"
    return [f"no learner is running; start it again: {command}"]


def _format_age(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
