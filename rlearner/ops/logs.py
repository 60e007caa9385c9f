"""``rlearner logs``: the logs of a run's processes, or of a fleet their newest warnings."""

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
from rlearner.ops.log_files import LEVELS, LogEntry, LogFile, merge_logs

POLL_S: Final = 0.2
# Entries before those that follow, unless --lines or --since is given: about a screen.
FOLLOWED: Final = 20
LEVEL_STYLES: Final = {
    "DEBUG": "dim",
    "WARNING": "yellow",
    "ERROR": "bold red",
    "CRITICAL": "bold red",
}
# Its name among the processes, and its file.
SERVER_LOG: Final = ("broker", f"{STORE}/nats-server.log")
FOLDER: Final = "logs"


async def show_logs(options: argparse.Namespace) -> int:
    """Print the logs and return the exit code.

    Raises:
        UserError: if no process of that name has a log or is on the broker.
    """
    place = find_run(options.run_name, options.dir)
    paths = _log_paths(place, options.roles)
    if not paths:
        return await _show_fleet(options, place)
    files = {name: LogFile(path, name) for name, path in paths.items()}
    show = _Printer(options)
    try:
        entries: Iterable[LogEntry] = filter(show.wants, merge_logs(files.values(), options.since))
        num_entries = options.lines
        if num_entries is None and options.follow and not options.since:
            num_entries = FOLLOWED
        if num_entries is not None:
            entries = deque(entries, num_entries)
        for entry in entries:
            show(entry)
        while options.follow:
            await asyncio.sleep(POLL_S)
            for name, path in _log_paths(place, options.roles, files).items():
                files[name] = LogFile(path, name)
            news = [entry for file in files.values() for entry in file.news() if show.wants(entry)]
            for entry in sorted(news, key=lambda entry: entry.time):
                show(entry)
    finally:
        for file in files.values():
            file.close()
    return 0


def _log_paths(
    place: RunPlace, roles: list[str], known_names: Iterable[str] = ()
) -> dict[str, Path]:
    """Return the files of the named processes by name, without those that are known."""
    paths = {path.stem: path for path in sorted((place.folder / FOLDER).glob("*.log"))}
    if (server := place.folder / SERVER_LOG[1]).exists():
        paths[SERVER_LOG[0]] = server
    return {
        name: path
        for name, path in paths.items()
        if name not in known_names and (not roles or name in roles)
    }


class _Printer:
    """Prints entries as lines, coloured on a terminal, or as JSON."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._as_json = options.json
        self._least = LEVELS.index(options.level)
        self._console = Console(soft_wrap=True, highlight=False, markup=False, emoji=False)

    def wants(self, entry: LogEntry) -> bool:
        """Return whether the level is high enough."""
        return LEVELS.index(entry.level) >= self._least

    def __call__(self, entry: LogEntry) -> None:
        """Print one entry at once."""
        if self._as_json:
            print(visible_json(_to_json(entry)), flush=True)
            return
        at = " " * 23
        if entry.time:
            at = f"{datetime.fromtimestamp(entry.time):%Y-%m-%d %H:%M:%S.%f}"[:-3]
        style = LEVEL_STYLES.get(entry.level, "")
        head = Text()
        head.append(at, style="dim").append(" ")
        head.append(f"{entry.level:7}", style=style).append(" ")
        head.append(f"{entry.process:14}", style="cyan").append(" ")
        self._console.print(head + Text(visible(entry.message), style=style))
        for line in entry.below:
            self._console.print(Text(visible(line), style=style))
        sys.stdout.flush()


def _to_json(entry: LogEntry) -> dict[str, Any]:
    """Return an entry for ``--json``; the time is UTC in ISO 8601."""
    at = None
    if entry.time:
        at = datetime.fromtimestamp(entry.time, UTC).isoformat(timespec="milliseconds")
    return {
        "time": at,
        "level": entry.level,
        "process": entry.process,
        "run": entry.run,
        "role": entry.role,
        "id": entry.id,
        "message": entry.message,
        "below": entry.below,
    }


async def _show_fleet(options: argparse.Namespace, place: RunPlace) -> int:
    """Print the newest warning of each process on the broker, and where its log is.

    Raises:
        UserError: if the broker does not answer, or has no such process.
    """
    local = sorted(_log_paths(place, []))
    async with connect_run(options, place.name, place.folder) as (bus, problem):
        if bus is None:
            folder = place.folder / FOLDER
            logs = f"no log of rlearner up in {folder}"
            if local:
                roles = ", ".join(options.roles)
                logs = f"logs of {', '.join(local)} in {folder}, not of {roles}"
            raise UserError(f"run {place.name} has {logs}; on its broker: {problem}")
        newest: dict[str, str] = {}
        while True:
            processes = [
                presence
                for presence in await census(bus, place.name)
                if _is_named(presence, options.roles)
            ]
            if not processes and not newest:
                raise _no_process_error(bus, place, options.roles, local)
            for presence in processes:
                if newest.get(presence.id) != presence.said:
                    is_first = presence.id not in newest
                    _print_presence(presence, as_json=options.json, is_first=is_first)
                    newest[presence.id] = presence.said
            if not options.follow:
                return 0
            await asyncio.sleep(1.0)


def _is_named(presence: wire.Presence, roles: list[str]) -> bool:
    names = {presence.role, presence.id, display_name(presence.role, presence.id)}
    return not roles or bool(names & set(roles))


def _no_process_error(bus: Bus, place: RunPlace, roles: list[str], local: list[str]) -> UserError:
    processes = " ".join(["no process", ", ".join(roles)]).rstrip()
    text = f"run {place.name} has {processes} on the broker at {bus.link.where}"
    if local:
        text += f"; {place.folder / FOLDER} has {', '.join(local)}"
    return UserError(text)


def _print_presence(presence: wire.Presence, *, as_json: bool, is_first: bool) -> None:
    log = _locate_log(presence)
    if as_json:
        names = ("role", "id", "host", "pid", "state", "said", "problem")
        fields = {name: getattr(presence, name) for name in names} | {"log": log}
        print(visible_json(fields), flush=True)
        return
    name = display_name(presence.role, presence.id)
    newest = presence.said or "no warning in the last 10 minutes"
    line = f"{name} on {presence.host} (pid {presence.pid}), {presence.state}: {newest}"
    if is_first:
        print(visible(line))
        print(visible(f"  its log: {log}"))
    else:
        print(visible(f"{time.strftime('%H:%M:%S')}  {line}"))
    sys.stdout.flush()


def _locate_log(presence: wire.Presence) -> str:
    """Return the file of a process's stderr on this machine, or the command for its journal."""
    by_pid = f"journalctl _PID={presence.pid} -f"
    if presence.host != socket.gethostname():
        return f"on {presence.host}: {by_pid}; under Slurm the file of the job's --output"
    process = Path(f"/proc/{presence.pid}")
    # Another user's process cannot be read.
    with suppress(OSError):
        target = os.readlink(process / "fd/2")
        if target.startswith("/") and not target.startswith("/dev/"):
            return target
        unit = (process / "cgroup").read_text(encoding="utf-8").strip().rpartition("/")[2]
        if unit.endswith(".service"):
            return f"journalctl -u {unit} -f"
    return f"{by_pid}, its terminal, or its --log-file"
