"""``rlearner runs``: lists the runs in a folder, and prunes those that have ended."""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from broker.contract.wire import PlainSettings
from broker.errors import UserError
from broker.settings.run_address import UP_LOCK, current_address, is_held
from broker.settings.run_settings import stored_value
from broker.system.locks import lock
from broker.system.visible_text import visible_json
from learner.reporting.metrics import newest_line
from learner.run_folder import OFFLINE_LOCK, STORE, previous_broker
from rlearner.ops.live_learners import ask_broker
from rlearner.ops.run_kinds import RESULT

FINISHED = "finished"
STOPPED = "stopped"
UNKNOWN = "broker away"
EVALUATION = "evaluation"
TRAINING = "training"
UNREADABLE = "unreadable"
# Columns of a file or a pipe, where nothing is cut.
WIDE = 10_000
# Files that an ended run no longer needs; a finished one does not need its store either.
LEFTOVERS = ("demos.log", "*.new")


@dataclass(frozen=True)
class RunSummary:
    """One row of the list.

    Attributes:
        state: training, starting, finished, stopped, ``broker away`` (its broker does not answer,
            so it may train),
        evaluation, unreadable.
        step: steps made, of ``steps``.
        size_bytes: size on disk.
        changed: when the last step was made or the settings were written; seconds since 1970.
    """

    name: str
    folder: str
    state: str
    step: int
    steps: int
    size_bytes: int
    changed: float


async def list_runs(options: argparse.Namespace) -> int:
    """Print the runs, or prune them, and return the exit code."""
    runs = await asyncio.gather(*(summarize_run(folder) for folder in _run_folders(options.folder)))
    if options.prune:
        _prune_runs(runs, sure=options.yes, as_json=options.json)
    elif options.json:
        print(json.dumps({"runs": [asdict(run) for run in runs]}))
    elif not runs:
        print(f"no runs in {options.folder}")
    else:
        _print_table(runs)
    return 0


def _run_folders(root: str) -> list[Path]:
    """Return the folders of the runs in a folder.

    Raises:
        UserError: if there is no such folder.
    """
    if not Path(root).is_dir():
        raise UserError(f"{root}: no such folder; name the folder that holds the runs")
    return sorted(path.parent for path in Path(root).glob("*/config.yaml"))


@dataclass(frozen=True)
class RunFiles:
    """What the folder of a run says.

    Attributes:
        config: its settings, empty if they cannot be read.
        line: the newest one of metrics.jsonl, empty without one.
        changed: as in ``RunSummary``.
        url: of the broker to ask, empty if none is known.
    """

    folder: Path
    config: PlainSettings
    line: dict[str, Any]
    changed: float
    url: str

    @property
    def run(self) -> str:
        """Name of the run, empty if its settings cannot be read."""
        return str(stored_value(self.config, "run", "name") or "")

    @property
    def step(self) -> int:
        """Steps made."""
        return int(self.line.get("step", 0))

    @property
    def steps(self) -> int:
        """Steps that the run is to make, 0 if unknown."""
        steps = stored_value(self.config, "train", "steps")
        return steps if isinstance(steps, int) else 0

    def state(self, *, is_training: bool, problem: str) -> str:
        """Return the state as in ``RunSummary``; ``problem``: of its broker. Reads the folder."""
        if not self.run or not self.steps:
            return UNREADABLE
        if is_training or is_held(self.folder, OFFLINE_LOCK):
            return TRAINING
        if is_held(self.folder):
            return "starting"
        if (self.folder / RESULT).exists():
            return EVALUATION
        if self.step >= self.steps:
            return FINISHED
        return UNKNOWN if problem and previous_broker(self.folder, "") else STOPPED


def read_settings(folder: Path) -> PlainSettings:
    """Return the settings of a run, empty if they cannot be read."""
    try:
        settings = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return settings if isinstance(settings, dict) else {}


def read_files(folder: Path, settings: Callable[[Path], PlainSettings] = read_settings) -> RunFiles:
    """Read the folder of a run."""
    metrics = folder / "metrics.jsonl"
    times = [0.0]
    for path in (folder / "config.yaml", metrics):
        with suppress(OSError):
            times.append(path.stat().st_mtime)
    return RunFiles(
        folder,
        config=settings(folder),
        line=newest_line(metrics),
        changed=max(times),
        url=current_address(folder),
    )


async def summarize_run(folder: Path) -> RunSummary:
    """Return the row of a run, from its folder and, if it answers, its broker."""
    files = await asyncio.to_thread(read_files, folder)
    is_training = False
    problem = ""
    if files.url and files.run:
        learners, problem = await ask_broker(files.url, files.run)
        is_training = bool(learners)
    state = files.state(is_training=is_training, problem=problem)
    return RunSummary(
        name=folder.name,
        folder=str(folder),
        state=state,
        step=files.step,
        steps=files.steps if state != UNREADABLE else 0,
        size_bytes=await asyncio.to_thread(_disk_size, folder),
        changed=files.changed,
    )


def _disk_size(path: Path) -> int:
    """Return the bytes on disk of a file or a folder; files deleted in between do not count."""
    total = 0
    for file in [path, *path.rglob("*")]:
        with suppress(FileNotFoundError):
            # Blocks are what a deletion frees.
            total += file.lstat().st_blocks * 512
    return total


def _print_table(runs: list[RunSummary]) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("run", no_wrap=True)
    table.add_column("state", no_wrap=True)
    table.add_column("steps", no_wrap=True, justify="right")
    table.add_column("size", no_wrap=True, justify="right")
    table.add_column("last change", no_wrap=True)
    for run in runs:
        changed = f"{format_age(time.time() - run.changed)} ago"
        table.add_row(
            run.name, run.state, f"{run.step}/{run.steps}", size_text(run.size_bytes), changed
        )
    Console(width=None if sys.stdout.isatty() else WIDE).print(table)


def size_text(size_bytes: int) -> str:
    """Format a size in MiB or GiB."""
    mib = size_bytes / 2**20
    if mib < 1024:
        return f"{mib:.1f} MiB"
    return f"{mib / 1024:.1f} GiB"


def format_age(seconds: float) -> str:
    """Format a duration in one unit."""
    for unit, length in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def _removable_files(run: RunSummary) -> list[Path]:
    """Return files of an ended run that neither training nor an audit or a replay needs."""
    if run.state not in (FINISHED, STOPPED, EVALUATION):
        return []
    folder = Path(run.folder)
    files = [
        path for pattern in LEFTOVERS for path in sorted(folder.glob(pattern)) if path.is_file()
    ]
    store = folder / STORE
    if run.state != STOPPED and store.is_dir():
        files.append(store)
    return files


def _prune_runs(runs: list[RunSummary], *, sure: bool, as_json: bool) -> None:
    """Print what can be deleted, and delete it; as JSON only with ``--yes``.

    Raises:
        UserError: if there is no terminal to confirm it, and no ``--yes``.
    """
    sizes = {run.folder: {path: _disk_size(path) for path in _removable_files(run)} for run in runs}
    sizes_by_path = {path: size for folder in sizes.values() for path, size in folder.items()}
    if as_json:
        files = [{"path": str(path), "size_bytes": size} for path, size in sizes_by_path.items()]
        if sure:
            _delete_files(runs, sizes)
        print(visible_json({"removable": files, "deleted": sure}))
        return
    for path, size in sizes_by_path.items():
        print(f"{path}  {size_text(size)}")
    if not sizes_by_path:
        print("nothing to delete")
        return
    total = size_text(sum(sizes_by_path.values()))
    print(
        f"{total} in all; without its broker's store "
        "a finished run can be continued only with --rebase"
    )
    if not sure and not sys.stdin.isatty():
        raise UserError("--prune: needs a confirmation; add --yes, or run it in a terminal")
    if not sure and input("delete this? [y/N] ").strip().lower() not in ("y", "yes"):
        print("nothing was deleted")
        return
    _delete_files(runs, sizes)
    print(f"deleted {total}")


def _delete_files(runs: list[RunSummary], sizes: dict[str, dict[Path, int]]) -> None:
    for run in runs:
        if paths := sizes[run.folder]:
            problem = f"run {run.name} was started in the meantime; its files were not deleted"
            # A new `rlearner up` takes this lock first, so the files are not in use.
            with lock(Path(run.folder) / UP_LOCK, problem):
                for path in paths:
                    _delete_path(path)


def _delete_path(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
