"""Finds a run: its folder, its configuration and, if it answers, its broker."""

from __future__ import annotations

import argparse
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

import yaml
from pydantic import ValidationError

from broker.contract.wire import PlainSettings
from broker.errors import BrokerUnreachable, UserError
from broker.jetstream.bus import Bus
from broker.runtime.presence import census
from broker.settings.arguments import add_broker, add_json, positive
from broker.settings.run_address import (
    ADDRESS,
    broker_address,
    find_folder,
    noted_address,
    private_addresses,
)
from broker.settings.run_settings import RunSettings, stored_value
from broker.settings.runspec import find_runs
from broker.settings.sections import first_problem
from broker.system.private_files import private_write

EPOCH: Final = "epoch"
# Folder of the private broker of `rlearner up`.
STORE: Final = "broker"
# held by `rlearner sft`, `dpo`, `distill` and `rm`
OFFLINE_LOCK: Final = "lock"
# start of the reason if there is a learner, but no run yet
STARTING: Final = "the learner is starting"
# Part of the reason if the broker answered.
UNKNOWN: Final = "does not know run"
# Commands for people: without a broker they answer from the run's folder after this.
DEADLINE_S: Final = 2.0


@dataclass(frozen=True)
class RunPlace:
    """A run's folder and the contents of its config.yaml."""

    name: str
    folder: Path
    config: PlainSettings

    @cached_property
    def settings(self) -> RunSettings:
        """The settings, as this version reads them.

        Raises:
            UserError: if a value is not allowed.
        """
        try:
            return RunSettings.of_config(self.config)
        except ValidationError as error:
            file = self.folder / "config.yaml"
            raise UserError(f"{file}: {first_problem(error)}") from None

    @property
    def steps(self) -> int:
        """Steps that the run is to make, 0 if the file does not say."""
        steps = stored_value(self.config, "train", "steps")
        return steps if isinstance(steps, int) else 0


def add_run_options(parser: argparse.ArgumentParser, *, needed: bool = True) -> None:
    """Add RUN and --dir; without ``needed``, no RUN is the empty name, see ``find_run``."""
    text = "name of the run, or its folder"
    if needed:
        parser.add_argument("run_name", metavar="RUN", help=text)
    else:
        text += " (the newest run)"
        parser.add_argument("run_name", metavar="RUN", nargs="?", default="", help=text)
    parser.add_argument(
        "--dir", default="runs", metavar="FOLDER", help="where runs are kept (%(default)s)"
    )


def add_runs_options(parser: argparse.ArgumentParser) -> None:
    """Add DIR, --json, --prune and --yes."""
    parser.add_argument(
        "folder", nargs="?", default="runs", metavar="DIR", help="where runs are kept (%(default)s)"
    )
    add_json(parser)
    prune = (
        "delete the broker's store of finished runs and leftovers of ended ones; "
        "docs/runs.md describes each file"
    )
    parser.add_argument("--prune", action="store_true", help=prune)
    parser.add_argument("--yes", action="store_true", help="prune without asking")


def add_broker_options(parser: argparse.ArgumentParser) -> None:
    """Add --broker and --connect-deadline; a broker that the user named must answer."""
    add_broker(parser, is_noted=True)
    parser.add_argument(
        "--connect-deadline",
        type=positive,
        default=DEADLINE_S,
        metavar="SECONDS",
        help="give up after (%(default)s)",
    )


def find_run(run: str, folder: str) -> RunPlace:
    """Return the run of that name below ``folder``, or in the folder that ``run`` names.

    The empty name is the run below ``folder`` that changed last.

    Raises:
        UserError: if there is none.
    """
    run = run or _newest_run(folder)
    if path := find_folder(run, folder):
        return _read_place(path)
    for path in (Path(folder) / run, Path(run)):
        if path.is_dir() and run not in ("", "."):
            raise UserError(f"{path}: has no config.yaml, so it is not the folder of a run")
    names = sorted(path.parent.name for path in Path(folder).glob("*/config.yaml"))
    raise UserError(
        f"no run {run!r} below {folder}; there is {', '.join(names) or 'none'}; name its folder, "
        "or give --dir"
    )


def _newest_run(folder: str) -> str:
    """Return the name of the folder whose settings or metrics were written last.

    Raises:
        UserError: if there is no run.
    """
    times: dict[str, float] = {}
    for path in Path(folder).glob("*/config.yaml"):
        for file in (path, path.parent / "metrics.jsonl"):
            # A run may be deleted now.
            with suppress(OSError):
                changed = file.stat().st_mtime
                times[path.parent.name] = max(changed, times.get(path.parent.name, 0.0))
    if not times:
        raise UserError(f"no run below {folder}; name its folder, or give --dir")
    return max(times, key=lambda name: times[name])


def _read_place(path: Path) -> RunPlace:
    file = path / "config.yaml"
    try:
        config = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"{file}: cannot be read: {' '.join(str(error).split())}") from None
    try:
        return RunPlace(str(config["run"]["name"]), path.absolute(), config)
    except (TypeError, KeyError):
        raise UserError(f"{file}: does not hold the settings of a run; expected run.name") from None


def previous_broker(folder: Path, url: str) -> str:
    """Return the noted broker; empty if it is ``url``, has ended or is unknown."""
    noted = noted_address(folder)
    return "" if noted in (url, *private_addresses(folder)) else noted


def note_broker(folder: Path, url: str) -> None:
    """Note the broker's address for the operator's commands, unless it holds a password."""
    if "@" not in url:
        private_write(folder / ADDRESS, f"{url}\n".encode())


def note_epoch(folder: Path, epoch: int, holder: str) -> None:
    """Note the newest epoch in the run's folder: other processes know it if the broker loses it.

    Args:
        holder: the process that took it, see ``broker/system/process_identity.py``.
    """
    private_write(folder / EPOCH, f"{epoch}\n{holder}\n".encode())


def noted_epoch(folder: Path) -> int:
    """Return the newest epoch that a learner of this folder has taken, 0 if none is noted."""
    epoch = _epoch_note(folder)[0]
    return int(epoch) if epoch.isdecimal() else 0


def noted_holder(folder: Path) -> str:
    """Return the process that took the newest epoch of this folder, empty if none is noted."""
    return _epoch_note(folder)[1]


def _epoch_note(folder: Path) -> tuple[str, str]:
    note = folder / EPOCH
    lines = note.read_text(encoding="utf-8").splitlines() if note.is_file() else []
    epoch, holder = [*lines, "", ""][:2]
    return epoch.strip(), holder.strip()


@asynccontextmanager
async def connect_run(
    options: argparse.Namespace, run: str, folder: Path
) -> AsyncIterator[tuple[Bus | None, str]]:
    """Connect to the run's broker; yield it, or None and the reason.

    Raises:
        UserError: if the user named a broker that does not answer.
    """
    url = broker_address(options.broker, folder)
    try:
        bus = await Bus.connect(
            url, run, name=f"operator-{os.getpid()}", deadline_s=options.connect_deadline
        )
    except BrokerUnreachable as error:
        if options.broker:
            raise
        yield None, str(error)
        return
    try:
        if run in await find_runs(bus):
            yield bus, ""
        elif any(presence.role == "learner" for presence in await census(bus, run)):
            yield (
                None,
                f"{STARTING}: the broker at {bus.link.where} sees its learner, which has not "
                "taken the run yet",
            )
        else:
            yield None, f"the broker at {bus.link.where} {UNKNOWN} {run}"
    finally:
        await bus.close()
