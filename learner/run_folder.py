"""Where a run lives: its folder, its configuration and, where one answers, its broker."""

from __future__ import annotations

import argparse
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from broker.errors import BrokerUnreachable, UserError
from broker.jetstream.bus import Bus
from broker.runtime import process
from broker.runtime.presence import census
from broker.settings.arguments import positive
from broker.settings.runspec import find_runs
from broker.system.locks import lock

ADDRESS: Final = "broker.url"
EPOCH: Final = "epoch"
STORE: Final = "broker"  # of the private broker of `rlearner up`
UP_LOCK: Final = ".lock"  # held by `rlearner up`; a line with its process id, then one with the address of its private broker
STARTING: Final = "the learner is starting"  # how the reason begins where there is one, and no run yet
UNKNOWN: Final = "does not know run"  # a part of the reason where the broker has answered
DEADLINE_S: Final = 2.0


@dataclass(frozen=True)
class Place:
    """A run's folder, and what stands in its config.yaml."""

    name: str
    folder: Path
    config: dict[str, Any]


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """RUN, --dir."""
    parser.add_argument("run_name", metavar="RUN", help="name of the run, or its folder")
    parser.add_argument("--dir", default="runs", metavar="FOLDER", help="where runs are kept (%(default)s)")


def add_runs_options(parser: argparse.ArgumentParser) -> None:
    """DIR, --json, --prune, --yes."""
    parser.add_argument("folder", nargs="?", default="runs", metavar="DIR", help="where runs are kept (%(default)s)")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    prune = "delete what can go: the broker's store of finished runs, leftovers of ended ones; docs/runs.md says what each file is for"
    parser.add_argument("--prune", action="store_true", help=prune)
    parser.add_argument("--yes", action="store_true", help="prune without asking")


def add_broker_options(parser: argparse.ArgumentParser) -> None:
    """--broker and --connect-deadline; a broker that the user named must answer."""
    parser.add_argument(
        "--broker",
        metavar="URL",
        default=os.environ.get("RL_BROKER") or None,
        help=f"address of the broker (RL_BROKER, {process.DEFAULT_BROKER})",
    )
    parser.add_argument("--connect-deadline", type=positive, default=DEADLINE_S, metavar="SECONDS", help="give up after (%(default)s)")


def find(run: str, folder: str) -> Place:
    """The run of that name below ``folder``, or in the folder that ``run`` names.

    Raises:
        UserError: there is none.
    """
    for path in (Path(folder) / run, Path(run)):
        if (path / "config.yaml").is_file():
            try:
                config = yaml.safe_load((path / "config.yaml").read_text(encoding="utf-8"))
                return Place(str(config["run"]["name"]), path.absolute(), config)
            except (OSError, yaml.YAMLError, TypeError, KeyError) as error:
                raise UserError(f"{path / 'config.yaml'}: cannot be read: {error}") from None
    known = sorted(path.parent.name for path in Path(folder).glob("*/config.yaml"))
    raise UserError(f"no run {run!r} below {folder}; there is {', '.join(known) or 'none'}; name its folder, or give --dir")


def address(named: str | None, folder: Path) -> str:
    """The broker that the user named, else that of an ``rlearner up`` at work, else the last one of the run, else the usual one."""
    return named or current_address(folder) or process.DEFAULT_BROKER


def current_address(folder: Path) -> str:
    """The private broker of the ``rlearner up`` that holds the folder, else the noted one; empty when there is none."""
    private = private_addresses(folder) if is_held(folder) else []
    return private[-1] if private else noted_address(folder)


def is_held(folder: Path) -> bool:
    """Whether an ``rlearner up`` holds the folder."""
    try:
        if (folder / UP_LOCK).exists():
            lock(folder / UP_LOCK, "held").close()
    except UserError:
        return True
    return False


def noted_address(folder: Path) -> str:
    """The broker that the run was last trained with, empty when none is noted."""
    note = folder / ADDRESS
    return note.read_text(encoding="utf-8").strip() if note.is_file() else ""


def private_addresses(folder: Path) -> list[str]:
    """Addresses that private brokers of this folder have had, oldest first; each ended with the ``rlearner up`` that started it."""
    file = folder / UP_LOCK
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    return [line for line in lines if "://" in line]


def moved_from(folder: Path, url: str) -> str:
    """The address of another broker than ``url`` that the run was last trained with; empty when there is none, or it has ended."""
    noted = noted_address(folder)
    return "" if noted in (url, *private_addresses(folder)) else noted


def note_broker(folder: Path, url: str) -> None:
    """Leave the broker's address for the commands that operate the run; not one that holds a password."""
    if "@" not in url:
        (folder / ADDRESS).write_text(url + "\n", encoding="utf-8")


def note_epoch(folder: Path, epoch: int, holder: str) -> None:
    """Leave the newest epoch in the run's folder: the broker may lose its own note of it, and survivors of that know better.

    Args:
        holder: the process that took it, see ``broker/system/process_identity.py``.
    """
    temporary = folder / f"{EPOCH}.new"
    with temporary.open("w", encoding="utf-8") as file:
        file.write(f"{epoch}\n{holder}\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(folder / EPOCH)


def noted_epoch(folder: Path) -> int:
    """The newest epoch that a learner of this folder has taken, 0 when none is noted."""
    epoch = _epoch_note(folder)[0]
    return int(epoch) if epoch.isdecimal() else 0


def noted_holder(folder: Path) -> str:
    """The process that took the newest epoch of this folder, empty when none is noted."""
    return _epoch_note(folder)[1]


def _epoch_note(folder: Path) -> tuple[str, str]:
    note = folder / EPOCH
    lines = note.read_text(encoding="utf-8").splitlines() if note.is_file() else []
    epoch, holder = [*lines, "", ""][:2]
    return epoch.strip(), holder.strip()


@asynccontextmanager
async def connected(options: argparse.Namespace, run: str, folder: Path) -> AsyncIterator[tuple[Bus | None, str]]:
    """The run's broker, or None and why not.

    Raises:
        UserError: the user named a broker, and it does not answer.
    """
    url = address(options.broker, folder)
    try:
        bus = await Bus.connect(url, run, name=f"operator-{os.getpid()}", deadline_s=options.connect_deadline)
    except BrokerUnreachable as error:
        if options.broker:
            raise
        yield None, str(error)
        return
    try:
        if run in await find_runs(bus):
            yield bus, ""
        elif any(one.role == "learner" for one in await census(bus, run)):
            yield None, f"{STARTING}: the broker at {bus.link.where} hears its learner, which has not taken the run yet"
        else:
            yield None, f"the broker at {bus.link.where} {UNKNOWN} {run}"
    finally:
        await bus.close()
