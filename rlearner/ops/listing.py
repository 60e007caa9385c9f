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

from broker.errors import UserError
from broker.system.locks import lock
from broker.system.visible_text import visible_json
from learner.reporting.metrics import newest_line
from learner.run_folder import STORE, UP_LOCK, current_address, is_held, previous_broker
from rlearner.ops.live_learners import ask_broker

FINISHED = "finished"
STOPPED = "stopped"
UNKNOWN = "broker away"
EVALUATION = "evaluation"
TRAINING = "training"
UNREADABLE = "unreadable"
WIDE = 10_000  # columns of a file or a pipe, where nothing is cut
# files that an ended run no longer needs; a finished one does not need its store either
LEFT = ("demos.log", "*.new")


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
    runs = await asyncio.gather(*(look(folder) for folder in _folders(options.folder)))
    if options.prune:
        _prune(runs, sure=options.yes, as_json=options.json)
    elif options.json:
        print(json.dumps({"runs": [asdict(run) for run in runs]}))
    elif not runs:
        print(f"no runs in {options.folder}")
    else:
        _table(runs)
    return 0


def _folders(root: str) -> list[Path]:
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
    config: dict[str, Any]
    line: dict[str, Any]
    changed: float
    url: str

    @property
    def run(self) -> str:
        """Name of the run, empty if its settings cannot be read."""
        return str(self._setting("run", "name", ""))

    @property
    def step(self) -> int:
        """Steps made."""
        return int(self.line.get("step", 0))

    @property
    def steps(self) -> int:
        """Steps that the run is to make, 0 if unknown."""
        found = self._setting("train", "steps", 0)
        return found if isinstance(found, int) else 0

    def state(self, *, is_training: bool, problem: str) -> str:
        """Return the state as in ``RunSummary``; ``problem``: of its broker. Reads the folder."""
        if not self.run or not self.steps:
            return UNREADABLE
        if is_training:
            return TRAINING
        if is_held(self.folder):
            return "starting"
        if (self.folder / "result.json").exists():
            return EVALUATION
        if self.step >= self.steps:
            return FINISHED
        return UNKNOWN if problem and previous_broker(self.folder, "") else STOPPED

    def _setting(self, section: str, key: str, otherwise: Any) -> Any:
        found = self.config.get(section)
        return found.get(key, otherwise) if isinstance(found, dict) else otherwise


def read_settings(folder: Path) -> dict[str, Any]:
    """Return the settings of a run, empty if they cannot be read."""
    try:
        found = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return found if isinstance(found, dict) else {}


def read_files(
    folder: Path, settings: Callable[[Path], dict[str, Any]] = read_settings
) -> RunFiles:
    """Read the folder of a run."""
    metrics = folder / "metrics.jsonl"
    times = [0.0]
    for path in (folder / "config.yaml", metrics):
        with suppress(OSError):
            times.append(path.stat().st_mtime)
    return RunFiles(
        folder, settings(folder), newest_line(metrics), max(times), current_address(folder)
    )


async def look(folder: Path) -> RunSummary:
    """Return the row of a run, from its folder and, if it answers, its broker."""
    files = await asyncio.to_thread(read_files, folder)
    learners, problem = (
        await ask_broker(files.url, files.run) if files.url and files.run else ([], "")
    )
    state = files.state(is_training=bool(learners), problem=problem)
    size = await asyncio.to_thread(_size, folder)
    steps = files.steps if state != UNREADABLE else 0
    return RunSummary(folder.name, str(folder), state, files.step, steps, size, files.changed)


def _size(path: Path) -> int:
    """Return the bytes on disk of a file or a folder, without files that are deleted while
    counting.
    """
    total = 0
    for each in [path, *path.rglob("*")]:
        with suppress(FileNotFoundError):
            total += each.lstat().st_blocks * 512
    return total


def _table(runs: list[RunSummary]) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for title in ("run", "state", "steps", "size", "last change"):
        table.add_column(
            title, justify="right" if title in ("steps", "size") else "left", no_wrap=True
        )
    for run in runs:
        changed = f"{age(time.time() - run.changed)} ago"
        table.add_row(
            run.name, run.state, f"{run.step}/{run.steps}", size_text(run.size_bytes), changed
        )
    Console(width=None if sys.stdout.isatty() else WIDE).print(table)


def size_text(size_bytes: int) -> str:
    """Format a size in MiB or GiB."""
    mib = size_bytes / 2**20
    return f"{mib:.1f} MiB" if mib < 1024 else f"{mib / 1024:.1f} GiB"


def age(seconds: float) -> str:
    """Format a duration in one unit."""
    for unit, length in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


# -------------------------------------------------------------------------------------------------------
# prune


def removable(run: RunSummary) -> list[Path]:
    """Return what can be deleted of a run that has ended: nothing that training, an audit or a
    replay needs.
    """
    if run.state not in (FINISHED, STOPPED, EVALUATION):
        return []
    folder = Path(run.folder)
    files = [path for pattern in LEFT for path in sorted(folder.glob(pattern)) if path.is_file()]
    store = folder / STORE
    return [*files, *([store] if run.state != STOPPED and store.is_dir() else [])]


def _prune(runs: list[RunSummary], *, sure: bool, as_json: bool) -> None:
    """Print what can be deleted, and delete it; as JSON only with ``--yes``.

    Raises:
        UserError: if there is no terminal to confirm it, and no ``--yes``.
    """
    sizes = {run.folder: {path: _size(path) for path in removable(run)} for run in runs}
    if as_json:
        files = [
            {"path": str(path), "size_bytes": size}
            for each in sizes.values()
            for path, size in each.items()
        ]
        if sure:
            _delete_all(runs, sizes)
        print(visible_json({"removable": files, "deleted": sure}))
        return
    for path, size_bytes in (
        (path, size) for each in sizes.values() for path, size in each.items()
    ):
        print(f"{path}  {size_text(size_bytes)}")
    total = size_text(sum(sum(each.values()) for each in sizes.values()))
    if not any(sizes.values()):
        print("nothing to delete")
        return
    print(
        f"{total} in all; without its broker's store a finished run can be continued only with --rebase"
    )
    if not sure and not sys.stdin.isatty():
        raise UserError("--prune: needs a confirmation; add --yes, or run it in a terminal")
    if not sure and input("delete this? [y/N] ").strip().lower() not in ("y", "yes"):
        print("nothing was deleted")
        return
    _delete_all(runs, sizes)
    print(f"deleted {total}")


def _delete_all(runs: list[RunSummary], sizes: dict[str, dict[Path, int]]) -> None:
    for run in runs:
        if paths := sizes[run.folder]:
            problem = f"run {run.name} was started in the meantime; its files were not deleted"
            with lock(Path(run.folder) / UP_LOCK, problem):
                for path in paths:
                    _delete(path)


def _delete(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
