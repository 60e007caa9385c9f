"""``rlearner logs``: the logs of a run's processes, merged by time; of a fleet, what its processes
tell the broker.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import sys
import time
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.text import Text

from broker.contract import wire
from broker.errors import UserError
from broker.jetstream.bus import Bus
from broker.runtime.presence import census, display_name
from broker.system.visible_text import visible, visible_json
from learner.run_folder import STORE, RunPlace, connect_run, find_run
from rlearner.ops.log_files import LEVELS, LogEntry, LogFile, merged

POLL_S: Final = 0.2
FOLLOWED: Final = 20  # entries before those that follow, unless --lines or --since is given
LEVEL_STYLES: Final = {
    "DEBUG": "dim",
    "WARNING": "yellow",
    "ERROR": "bold red",
    "CRITICAL": "bold red",
}
# its name among the processes, and its file
SERVER_LOG: Final = ("broker", f"{STORE}/nats-server.log")
FOLDER: Final = "logs"


async def show_logs(options: argparse.Namespace) -> int:
    """Print the logs and return the exit code.

    Raises:
        UserError: if no process of that name has a log or is on the broker.
    """
    place = find_run(options.run_name, options.dir)
    paths = _paths(place, options.roles)
    if not paths:
        return await _show_fleet(options, place)
    files = {name: LogFile(path, name) for name, path in paths.items()}
    show = _Printer(options)
    try:
        last = (
            options.lines
            if options.lines is not None
            else FOLLOWED
            if options.follow and not options.since
            else None
        )
        wanted = (entry for entry in merged(files.values(), options.since) if show.wants(entry))
        for entry in wanted if last is None else deque(wanted, last):
            show(entry)
        while options.follow:
            await asyncio.sleep(POLL_S)
            for name, path in _paths(place, options.roles, files).items():
                files[name] = LogFile(path, name)
            news = [entry for file in files.values() for entry in file.news() if show.wants(entry)]
            for entry in sorted(news, key=lambda one: one.time):
                show(entry)
    finally:
        for file in files.values():
            file.close()
    return 0


def _paths(place: RunPlace, roles: list[str], known: Iterable[str] = ()) -> dict[str, Path]:
    """Return the files of the named processes by name, without those that are known."""
    paths = {path.stem: path for path in sorted((place.folder / FOLDER).glob("*.log"))}
    if (server := place.folder / SERVER_LOG[1]).exists():
        paths[SERVER_LOG[0]] = server
    return {
        name: path
        for name, path in paths.items()
        if name not in known and (not roles or name in roles)
    }


class _Printer:
    """Prints entries as lines, coloured on a terminal, or as JSON."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._as_json, self._least = options.json, LEVELS.index(options.level)
        self._console = Console(soft_wrap=True, highlight=False, markup=False, emoji=False)

    def wants(self, entry: LogEntry) -> bool:
        """Return whether the level is high enough."""
        return LEVELS.index(entry.level) >= self._least

    def __call__(self, entry: LogEntry) -> None:
        """Print one entry at once."""
        if self._as_json:
            print(visible_json(plain(entry)), flush=True)
            return
        at = (
            f"{datetime.fromtimestamp(entry.time):%Y-%m-%d %H:%M:%S.%f}"[:-3]
            if entry.time
            else " " * 23
        )
        style = LEVEL_STYLES.get(entry.level, "")
        head = Text.assemble(
            (at, "dim"), " ", (f"{entry.level:7}", style), " ", (f"{entry.process:14}", "cyan"), " "
        )
        self._console.print(head + Text(visible(entry.message), style=style))
        for line in entry.below:
            self._console.print(Text(visible(line), style=style))
        sys.stdout.flush()


def plain(entry: LogEntry) -> dict[str, Any]:
    """Return an entry for ``--json``: the time is UTC in ISO 8601, ``below`` are the lines below
    it.
    """
    at = (
        datetime.fromtimestamp(entry.time, UTC).isoformat(timespec="milliseconds")
        if entry.time
        else None
    )
    found = {
        "time": at,
        "level": entry.level,
        "process": entry.process,
        "run": entry.run,
        "role": entry.role,
    }
    return {**found, "id": entry.id, "message": entry.message, "below": entry.below}


# --------------------------------------------------------------------------------------------------------
# fleet


async def _show_fleet(options: argparse.Namespace, place: RunPlace) -> int:
    """Print the newest warning of each process on the broker, and where its log is.

    Raises:
        UserError: if the broker does not answer, or has no such process.
    """
    local = sorted(_paths(place, []))
    async with connect_run(options, place.name, place.folder) as (bus, why):
        if bus is None:
            there = f"logs of {', '.join(local)}" if local else "no log of rlearner up"
            named = f", not of {', '.join(options.roles)}" if local else ""
            raise UserError(
                f"run {place.name} has {there} in {place.folder / FOLDER}{named}; on its broker: {why}"
            )
        said: dict[str, str] = {}
        while True:
            present = [
                one for one in await census(bus, place.name) if _is_named(one, options.roles)
            ]
            if not present and not said:
                raise _nothing_found(bus, place, options.roles, local)
            for one in present:
                if said.get(one.id) != one.said:
                    _print_presence(one, as_json=options.json, is_first=one.id not in said)
                    said[one.id] = one.said
            if not options.follow:
                return 0
            await asyncio.sleep(1.0)


def _is_named(one: wire.Presence, roles: list[str]) -> bool:
    return not roles or bool({one.role, one.id, display_name(one.role, one.id)} & set(roles))


def _nothing_found(bus: Bus, place: RunPlace, roles: list[str], local: list[str]) -> UserError:
    named = f"no process {', '.join(roles)}" if roles else "no process"
    there = f"; {place.folder / FOLDER} has {', '.join(local)}" if local else ""
    return UserError(f"run {place.name} has {named} on the broker at {bus.link.where}{there}")


def _print_presence(one: wire.Presence, *, as_json: bool, is_first: bool) -> None:
    where = log_of(one)
    if as_json:
        names = ("role", "id", "host", "pid", "state", "said", "problem")
        print(
            visible_json({name: getattr(one, name) for name in names} | {"log": where}), flush=True
        )
        return
    now = f"{time.strftime('%H:%M:%S')}  " if not is_first else ""
    newest = one.said or "no warning in the last 10 minutes"
    print(
        visible(
            f"{now}{display_name(one.role, one.id)} on {one.host} (pid {one.pid}), {one.state}: {newest}"
        )
    )
    if is_first:
        print(visible(f"  its log: {where}"))
    sys.stdout.flush()


def log_of(one: wire.Presence) -> str:
    """Return the file behind a process's stderr on this machine, else the command that shows its
    journal.
    """
    by_pid = f"journalctl _PID={one.pid} -f"
    if one.host != socket.gethostname():
        return f"on {one.host}: {by_pid}; under Slurm the file of the job's --output"
    with suppress(OSError):
        target = os.readlink(f"/proc/{one.pid}/fd/2")
        if target.startswith("/") and not target.startswith("/dev/"):
            return target
        unit = (
            Path(f"/proc/{one.pid}/cgroup").read_text(encoding="utf-8").strip().rpartition("/")[2]
        )
        if unit.endswith(".service"):
            return f"journalctl -u {unit} -f"
    return f"{by_pid}, its terminal, or its --log-file"
